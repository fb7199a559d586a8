"""The curve of GPUs against time: what every number of GPUs would give, and which of them the
objective takes.

A plan names one number of GPUs; whether it is a good one shows only beside the others. Called as
`Planner(spec, facts=facts, learned=learned).curve(inventory)`, which resolves the model as for a
plan.
"""

from dataclasses import dataclass

from grpo_api.text.timing import HOUR

from .demand import Demand
from .option import Option
from .search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The best plan on one number of GPUs."""

    gpus: int
    nodes: int
    gpu_product: str
    """Label of the GPUs; empty when unknown."""
    method: str
    """Such as `full ZeRO-3, Sharded`."""
    step_seconds: float
    """Estimated time of one optimizer step."""
    gpu_hours: float | None
    """GPU-hours of spec.training.maxSteps steps; None where the run goes by epochs."""
    price: float | None
    """What these GPU-hours cost, in the currency of the declared prices; None without them."""
    headroom: float
    """Share of a GPU's memory that the plan leaves free, after its margin; 0.2 and more is room."""
    chosen: bool
    """Whether the objective takes this one, were all nodes empty."""
    rule: str = ""
    """The rule that takes it; empty for the others."""

    @property
    def step_gpu_seconds(self) -> float:
        """GPU-seconds of one step: what more GPUs raise."""
        return self.gpus * self.step_seconds


def curve(search: Search) -> list[Size]:
    """One Size for each number of GPUs that something fits on and that splits the batch, fewest
    first."""
    # The curve and the plan come from one search, so that the size it marks is the one that is
    # planned.
    choice = search.choice
    options = search.sizes()
    rule = deciding_rule(search, choice) if choice else ""
    return [_size(option, search.demand, choice, rule) for option in options]


def deciding_rule(search: Search, choice: Option) -> str:
    """The rule that took a number of GPUs, in a few words."""
    demand = search.demand
    objective = demand.spec.placement.objective
    world = choice.place.world
    if demand.fewest_gpus == demand.most_gpus:
        return "as many GPUs as asked for"
    fits_on_more = search.has_fitting(lambda other: other > world, choice.tier)
    if not fits_on_more and not search.has_fitting(lambda other: other < world, choice.tier):
        return "no other number of GPUs fits"
    if objective != "Balanced":
        return f"objective {objective}"
    if not fits_on_more:
        return "the most GPUs that there are: they save more than they cost"
    return "the knee: more GPUs would cost more than they save"


def _size(option: Option, demand: Demand, choice: Option | None, rule: str) -> Size:
    """An option as the curve shows it; `choice` is the one that is planned."""
    steps = demand.spec.training.max_steps
    chosen = choice is not None and option.place.world == choice.place.world
    place = option.place
    hours = steps * place.world * option.seconds / HOUR if steps else None
    return Size(
        gpus=place.world,
        nodes=place.nodes,
        gpu_product=place.pool.label,
        method=option.footprint.method.name,
        step_seconds=option.seconds,
        gpu_hours=hours,
        price=hours * place.pool.price if hours and place.pool.price else None,
        headroom=1 - option.device_share,
        chosen=chosen,
        rule=rule if chosen else "",
    )
