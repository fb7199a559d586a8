"""The curve of GPUs against time: what every number of GPUs would give, and which of them the
objective takes.

A plan names one number of GPUs; whether it is a good one shows only beside the others. Called as
`Planner(spec, facts=facts, learned=learned).curve(inventory)`, which resolves the model as for a
plan.
"""

from dataclasses import dataclass

from grpo_api.text.timing import HOUR

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

    @property
    def step_gpu_seconds(self) -> float:
        """GPU-seconds of one step: what more GPUs raise."""
        return self.gpus * self.step_seconds


def curve(search: Search) -> list[Size]:
    """One Size for each number of GPUs that something fits on and that splits the batch, fewest
    first."""
    spec = search.demand.spec
    taken = search.choice
    return [
        _size(
            option,
            spec.training.max_steps,
            chosen=taken is not None and option.place.world == taken.place.world,
        )
        for option in search.sizes()
    ]


def _size(option: Option, steps: int | None, *, chosen: bool) -> Size:
    """An option as the curve shows it."""
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
    )
