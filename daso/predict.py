"""Before it is queued: schedules on virtual time, and this machine slowed down like another one.

`simulate` goes through a schedule on virtual time. `simulate_target` slows this machine down, so
that your own program runs in proportion as it would on the target of a `ThrottlePlan`; `estimate`
makes of its times those of the target. Nothing of both is a measurement of the target.
"""

from daso.plan.throttles import Estimate, Machine, ThrottlePlan, estimate
from daso.sim.cluster import Cluster, Job
from daso.sim.network import Link
from daso.sim.run import Outcome, simulate
from daso.train.target import simulate_target

__all__ = [
    "Cluster",
    "Estimate",
    "Job",
    "Link",
    "Machine",
    "Outcome",
    "ThrottlePlan",
    "estimate",
    "simulate",
    "simulate_target",
]
