"""Predictions before a job is queued: schedules on virtual time, or this machine slowed down.

`simulate` runs a schedule on virtual time. `simulate_target` slows this machine down, so that a
program's times are proportional to those on the target of a `ThrottlePlan`; `estimate` converts its
step times to the target's. Neither is a measurement of the target.
"""

from typing import TYPE_CHECKING

from daso.public_names import on_first_use

if TYPE_CHECKING:
    from daso.predict.cluster import Cluster
    from daso.predict.copy_sweep import LinkSweep, slow_copies, sweep_link
    from daso.predict.emulate import simulate_target
    from daso.predict.jobs import Job
    from daso.predict.links import Link
    from daso.predict.measure import measure_machine
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
    | dict.fromkeys(("LinkSweep", "slow_copies", "sweep_link"), "daso.predict.copy_sweep")
    | dict.fromkeys(("Outcome", "simulate"), "daso.predict.simulator")
    | {
        "Cluster": "daso.predict.cluster",
        "Job": "daso.predict.jobs",
        "Link": "daso.predict.links",
        "measure_machine": "daso.predict.measure",
        "simulate_target": "daso.predict.emulate",
    },
)
