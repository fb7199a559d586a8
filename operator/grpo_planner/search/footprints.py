"""Footprints: what each way of running a job takes, whichever GPUs it would run on.

Memory depends on the number of processes and the settings alone. So pools of many products share
these numbers, and so do all the searches of one plan: on free nodes, on emptied nodes and for each
fix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import HOST

from ..hardware.pools import Place
from ..memory import engine as terms
from ..memory.host import host_bytes
from ..memory.phases import Prediction, Predictor
from ..memory.setup import Engine, Precision, Setup
from . import batch
from .demand import Demand
from .methods import Method

TRAINING_PHASES = ("load", "reference", "forward", "backward", "step")
"""Phases to whose peak whatever samples the completions can only add."""
NOWHERE = Engine(kind="Servers", length=1)
"""An engine that takes nothing of the trainer's GPUs."""
Settings = tuple[bool, int, bool, int]
"""One value of each of Knobs, in its order."""


class Knobs(NamedTuple):
    """What may be tried for each setting that trades memory for time, from fastest to leanest."""

    gather: tuple[bool, ...]
    generation_batch: tuple[int, ...]
    checkpointing: tuple[bool, ...]
    micro_batch: tuple[int, ...]

    @property
    def fastest(self) -> Settings:
        """Nothing that saves memory."""
        return self.gather[0], self.generation_batch[0], self.checkpointing[0], self.micro_batch[0]

    @property
    def leanest(self) -> Settings:
        """Everything that saves memory."""
        return (
            self.gather[-1],
            self.generation_batch[-1],
            self.checkpointing[-1],
            self.micro_batch[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One way of running the job and what it takes of each GPU."""

    method: Method
    setup: Setup
    prediction: Prediction
    device: int
    """Bytes that one GPU must have."""
    calls: float
    """Calls of generate per optimizer step; below 1 where one batch feeds several steps."""


class Variants:
    """One method on a number of processes in one precision, at every setting of its knobs."""

    def __init__(
        self,
        of: "Footprints",
        world: int,
        method: Method,
        precision: Precision,
        engine: Engine | None,
    ) -> None:
        """Works nothing out yet."""
        self._demand, self._predictor = of.demand, of.predictor
        self._world, self._method, self._precision, self.engine = world, method, precision, engine
        self._knobs = of.knobs(world, gathers=method.zero == 3 and engine is None)
        if engine:
            self._knobs = self._knobs._replace(
                generation_batch=_sampled_at_a_time(self._knobs, engine)
            )
        self._footprints: dict[Settings, Footprint] = {}
        self._host: dict[int, int] = {}

    @cached_property
    def fastest(self) -> Footprint:
        """The variant that saves no memory."""
        return self._footprint(self._knobs.fastest)

    @cached_property
    def quickest(self) -> tuple[Setup, float]:
        """Setup and calls of generate of the fastest variant, whose time is a bound that needs no
        prediction."""
        setup = self._setup(self._knobs.fastest)
        return setup, self._calls(setup)

    @cached_property
    def leanest(self) -> Footprint:
        """The variant that takes least of a GPU.

        The smallest micro-batch saves activations but leaves gradients waiting while the others are
        accumulated. Where the largest is a process's whole share of a step, nothing waits, and that
        may save more than it costs.
        """
        smallest, largest = self._footprint(self._knobs.leanest), self._knobs.micro_batch[0]
        if (
            smallest.setup.is_accumulating
            and batch.accumulation(self._demand.spec, self._world, largest) == 1
        ):
            at_once = self._footprint((*self._knobs.leanest[:3], largest))
            return min(smallest, at_once, key=lambda footprint: footprint.device)
        return smallest

    @cached_property
    def training_floor(self) -> int:
        """Bytes of a GPU that training takes at every setting, whatever samples the completions.

        Where parameters are not gathered to generate, training takes less, too.
        """
        sizes = self._knobs.micro_batch
        return min(self._training_bytes(size) for size in {sizes[0], sizes[-1]})

    def _training_bytes(self, micro_batch: int) -> int:
        """Bytes of a GPU that training takes with everything else that saves memory."""
        settings = (*self._knobs.leanest[:3], micro_batch)
        setup = replace(self._setup(settings), gather=False, engine=NOWHERE)
        prediction = self._demand.correct_prediction(self._predictor.predict(setup))
        phases = {name: prediction.phases[name] for name in TRAINING_PHASES}
        training = Prediction(phases, prediction.static)
        return self._demand.device_bytes(training, self._world)

    @property
    def floor(self) -> int:
        """Bytes that the leanest variant takes of a GPU on any number of processes: its passes and
        nothing else."""
        return self._demand.device_bytes(self._predictor.floor(self._setup(self._knobs.leanest)), 1)

    def host(self, processes: int) -> int:
        """Bytes of host memory that a pod of `processes` processes must have; the same for all
        variants."""
        if processes not in self._host:
            bare = host_bytes(self._demand.shape, self._setup(self._knobs.leanest), processes)
            self._host[processes] = round(bare * self._demand.learned.factor(HOST))
        return self._host[processes]

    def may_fit(self, place: Place) -> bool:
        """Whether the leanest variant fits into a place; host memory first, which needs no
        prediction."""
        return (
            self.host(place.per_node) <= place.host_memory
            and self.leanest.device <= place.pool.usable_bytes
        )

    def fitting(self, usable: int) -> Iterator[Footprint]:
        """For each choice of gathering, generation batch and checkpointing the largest micro-batch
        that fits, which is the fastest.

        What generates takes nothing of the update's memory, but for an engine that stays awake. So
        without one only the largest generation batch that fits is looked at.
        """
        knobs = self._knobs
        fastest_update = (knobs.checkpointing[0], knobs.micro_batch[0])
        for gather in knobs.gather:
            for size in self._generation_batches(gather, usable):
                updates = set()
                for checkpointing in knobs.checkpointing:
                    largest = self._first_fit(
                        [(gather, size, checkpointing, micro) for micro in knobs.micro_batch],
                        usable,
                    )
                    if largest:
                        updates.add((checkpointing, largest.setup.micro_batch))
                        yield largest
                # A smaller generation batch can't make the update any faster.
                if fastest_update in updates:
                    break

    def _generation_batches(self, gather: bool, usable: int) -> Sequence[int]:
        """The generation batches that may be the best beside some update."""
        sizes = self._knobs.generation_batch
        engine = self.engine
        if engine and engine.kind == "Colocated" and not (engine.sleeps or engine.share):
            return sizes
        lean = self.leanest.setup
        settings = [(gather, size, lean.checkpointing, lean.micro_batch) for size in sizes]
        largest = self._first_fit(settings, usable)
        return [largest.setup.generation_batch] if largest else []

    def _first_fit(self, ordered: Sequence[Settings], usable: int) -> Footprint | None:
        """The first that fits of settings ordered by falling memory; bisection predicts few of
        them."""
        best, low, high = None, 0, len(ordered)
        middle = 0  # The fastest settings first: where memory is ample, nothing else is looked at.
        while low < high:
            footprint = self._footprint(ordered[middle])
            if footprint.device <= usable:
                best, high = footprint, middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return best

    def _footprint(self, settings: Settings) -> Footprint:
        """One variant with its numbers."""
        known = self._footprints.get(settings)
        if known is None:
            demand, setup = self._demand, self._setup(settings)
            prediction = demand.correct_prediction(
                self._predictor.predict(setup, demand.scoring_bytes)
            )
            known = self._footprints[settings] = Footprint(
                method=self._method,
                setup=setup,
                prediction=prediction,
                device=demand.device_bytes(prediction, self._world),
                calls=self._calls(setup),
            )
        return known

    def _calls(self, setup: Setup) -> float:
        return generate_calls(self._demand.spec, setup)

    def _setup(self, settings: Settings) -> Setup:
        spec, method = self._demand.spec, self._method
        gather, generation_batch, checkpointing, micro_batch = settings
        return Setup(
            precision=self._precision,
            prompt=spec.training.max_prompt_length,
            completion=spec.training.max_completion_length,
            expected=self._demand.expected_completion,
            micro_batch=micro_batch,
            accumulation=batch.accumulation(spec, self._world, micro_batch),
            generation_batch=generation_batch,
            world=self._world,
            zero=method.zero,
            offload=method.offload,
            lora_rank=spec.adapter.rank if method.lora else 0,
            lora_targets=tuple(spec.adapter.target_modules),
            eight_bit=method.eight_bit,
            checkpointing=checkpointing,
            gather=gather,
            reference=method.reference,
            scores_old_policy=self._demand.updates_per_generation > 1,
            engine=self.engine,
        )


def generate_calls(spec: GRPOJobSpec, setup: Setup) -> float:
    """Calls of generate per optimizer step, or how often an engine is filled with all that it
    samples at a time."""
    if setup.engine and setup.engine.kind == "Servers":
        return ceil(terms.replica_completions(setup) / terms.sequences(setup)) * setup.engine.syncs
    return batch.generate_calls(spec, setup.world, setup.generation_batch)


def _sampled_at_a_time(knobs: Knobs, engine: Engine) -> tuple[int, ...]:
    """Completions of one process that an engine samples at a time, from most to fewest.

    Servers have room of their own: what they sample at a time takes nothing of the trainer's GPUs.
    """
    whole = knobs.generation_batch[0]
    if engine.kind == "Servers":
        return (whole,)
    most = (
        max(1, engine.most_sequences // engine.tensor_parallel) if engine.most_sequences else whole
    )
    first = min(whole, most)
    return tuple(first >> bits for bits in range(first.bit_length()))


class Footprints:
    """The variants of one demand, kept for every pool and search that asks for them."""

    def __init__(self, demand: Demand, predictor: Predictor) -> None:
        """Works nothing out yet; `predictor` is the model's, shared with the demands of the
        fixes."""
        self.demand, self.predictor = demand, predictor
        self._variants: dict[tuple[int, Method, Precision, Engine | None], Variants] = {}
        self._knobs: dict[tuple[int, bool], Knobs] = {}
        self._floors: dict[tuple[bool, Precision, bool], int] = {}

    @cached_property
    def worlds(self) -> list[int]:
        """All numbers of processes that split the batch evenly and that the job asks for,
        ascending."""
        spec, fewest = self.demand.spec, self.demand.fewest_gpus
        sizes = batch.divisors(batch.step_completions(spec))
        return [size for size in sizes if size >= fewest and batch.micro_batches(spec, size)]

    def variants(
        self, world: int, method: Method, precision: Precision, engine: Engine | None = None
    ) -> Variants:
        """The variants of a method on `world` processes, with an engine or without."""
        key = (world, method, precision, engine)
        variants = self._variants.get(key)
        if variants is None:
            variants = self._variants[key] = Variants(self, world, method, precision, engine)
        return variants

    def floor(self, method: Method, precision: Precision, *, engined: bool = False) -> int:
        """Bytes that a GPU must have at the least for a method, however many there are.

        A bound that costs one prediction rules out whole methods on whole pools: what passes take
        doesn't shrink with more processes, and of a method they depend on whether it trains an
        adapter only. `engined`: where an engine generates in its place, of which nothing is
        counted.
        """
        key = (method.lora, precision, engined)
        if key not in self._floors:
            engine = NOWHERE if engined else None
            self._floors[key] = self.variants(self.worlds[0], method, precision, engine).floor
        return self._floors[key]

    def knobs(self, world: int, *, gathers: bool) -> Knobs:
        """What the spec's pins leave open; `gathers` under ZeRO-3, the only stage that has
        parameters to gather."""
        key = (world, gathers)
        if key not in self._knobs:
            self._knobs[key] = self._open_knobs(world, gathers)
        return self._knobs[key]

    def _open_knobs(self, world: int, gathers: bool) -> Knobs:
        spec = self.demand.spec
        pinned = {"Auto": (False, True), "Enabled": (True,), "Disabled": (False,)}
        gather = (
            tuple(reversed(pinned[spec.training.ds3_gather_for_generation])) if gathers else (True,)
        )
        whole = batch.generation_share(spec, world)
        return Knobs(
            gather=gather,
            generation_batch=tuple(whole >> bits for bits in range(whole.bit_length())),
            checkpointing=pinned[spec.training.gradient_checkpointing],
            micro_batch=tuple(reversed(batch.micro_batches(spec, world))),
        )
