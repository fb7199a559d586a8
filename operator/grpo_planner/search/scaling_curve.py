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
    engine_gpus: int
    """GPUs of engines in pods of their own, beside these."""
    nodes: int
    gpu_product: str
    """Label of the GPUs; empty when unknown."""
    method: str
    """Such as `full ZeRO-3, Sharded`."""
    step_seconds: float
    """Estimated time of one optimizer step."""
    step_gpu_seconds: float
    """GPU-seconds of one step, the engines' among them: what more GPUs raise."""
    gpu_hours: float | None
    """The GPU-hours of spec.training.maxSteps steps; None where the run goes by epochs."""
    price: float | None
    """What these GPU-hours cost, in the currency of the declared prices; None without them."""
    headroom: float
    """Share of a GPU's memory that the plan leaves free, after its margin; 0.2 and more is room."""
    chosen: bool
    """Whether the objective takes this one, were all nodes empty."""
    rule: str = ""
    """The rule that takes it; empty for the others."""


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
    if objective == "Cheapest":
        return "objective Cheapest, risks counted"
    if objective != "Balanced":
        return f"objective {objective}"
    if not fits_on_more:
        return "the most GPUs that the job can have: risks counted, they save more than they cost"
    return "the knee, risks counted: more GPUs would cost more than they save"


def _size(option: Option, demand: Demand, choice: Option | None, rule: str) -> Size:
    """An option as the curve shows it; `choice` is the one that is planned."""
    steps = demand.spec.training.max_steps
    chosen = choice is not None and option.place.world == choice.place.world
    place, servers = option.place, option.servers
    is_priced = place.pool.price and (servers is None or servers.price)
    hourly = place.pool.price * place.world + option.beside.price
    seconds = option.published_seconds
    gpu_seconds = seconds * (place.world + option.engine_gpus)
    return Size(
        gpus=place.world,
        engine_gpus=option.engine_gpus,
        nodes=place.nodes,
        gpu_product=place.pool.label,
        method=option.footprint.method.name,
        step_seconds=seconds,
        step_gpu_seconds=gpu_seconds,
        gpu_hours=steps * gpu_seconds / HOUR if steps else None,
        price=steps * seconds / HOUR * hourly if steps and is_priced else None,
        headroom=1 - option.device_share,
        chosen=chosen,
        rule=rule if chosen else "",
    )
