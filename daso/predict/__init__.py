"""Before it is queued: schedules on virtual time, and this machine slowed down like another one.

`simulate` goes through a schedule on virtual time. `simulate_target` slows this machine down, so
that your own program runs in proportion as it would on the target of a `ThrottlePlan`; `estimate`
makes of its times those of the target. Nothing of both is a measurement of the target.
"""

from typing import TYPE_CHECKING

from daso.public_names import on_first_use

if TYPE_CHECKING:
    from daso.predict.cluster import Cluster, Job
    from daso.predict.copy_sweep import slow_copies, sweep_link
    from daso.predict.emulate import simulate_target
    from daso.predict.link_sweep import LinkSweep
    from daso.predict.measure import measure_machine
    from daso.predict.network import Link
    from daso.predict.simulator import Outcome, simulate
    from daso.predict.throttle_plan import Estimate, Machine, ThrottlePlan, estimate

__all__ = [
    "Cluster",
    "Estimate",
    "Job",
    "Link",
    "LinkSweep",
    "Machine",
    "Outcome",
    "ThrottlePlan",
    "estimate",
    "measure_machine",
    "simulate",
    "simulate_target",
    "slow_copies",
    "sweep_link",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    dict.fromkeys(("Estimate", "Machine", "ThrottlePlan", "estimate"), "daso.predict.throttle_plan")
    | dict.fromkeys(("Cluster", "Job"), "daso.predict.cluster")
    | dict.fromkeys(("Outcome", "simulate"), "daso.predict.simulator")
    | dict.fromkeys(("slow_copies", "sweep_link"), "daso.predict.copy_sweep")
    | {
        "Link": "daso.predict.network",
        "LinkSweep": "daso.predict.link_sweep",
        "measure_machine": "daso.predict.measure",
        "simulate_target": "daso.predict.emulate",
    },
)
