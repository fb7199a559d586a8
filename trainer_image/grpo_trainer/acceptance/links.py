"""What several ranks add before the first step: they meet, and an all-reduce over the GPUs' links adds up."""

import os
from pathlib import Path

from ..gang import rendezvous
from ..gang.placement import Placement, launch_environment
from .findings import Context, Finding, judged
from .plans import make_plan


def all_reduce(context: Context) -> list[Finding]:
    """Run the first all-reduce of a gang, as in a pod, and report its bandwidth. Wrong sums raise."""
    plan = make_plan(context, model=Path("none-is-loaded"))
    place = Placement(0, context.rank, context.world, 1)
    os.environ.update(launch_environment(plan, place))
    speed = rendezvous.join(plan, place)
    rendezvous.leave_together()
    problems = [] if speed else ["no bandwidth was measured"]
    seen = f"{context.world} ranks, {(speed or 0.0) / 1e9:.2f} GB/s on the bus"
    return [judged("all-reduce", problems, seen, {"bytes_per_second": speed or 0.0})]
