"""What each way of running a job needs, whichever GPUs it would run on.

Exists because memory depends on the extent and the settings alone: pools of many products share the numbers, and so do
all the searches of one plan, on free nodes, on emptied nodes and for each fix. Used by search.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..memory import Precision, Prediction, Predictor, Setup
from ..memory.device import device_bytes, host_bytes
from . import batch
from .demand import MOST_SEQUENCES, Demand, Method


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings inside a family."""

    gather: bool
    generation_batch: int
    checkpointing: bool
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may be tried for each setting, from fastest to leanest."""

    gather: tuple[bool, ...]
    generation_batch: tuple[int, ...]
    checkpointing: tuple[bool, ...]
    micro_batch: tuple[int, ...]

    @property
    def fastest(self) -> Variant:
        """Nothing that saves memory."""
        return Variant(self.gather[0], self.generation_batch[0], self.checkpointing[0], self.micro_batch[0])

    @property
    def leanest(self) -> Variant:
        """Everything that saves activations."""
        return Variant(self.gather[-1], self.generation_batch[-1], self.checkpointing[-1], self.micro_batch[-1])

    @property
    def fewest_passes(self) -> Variant:
        """The same with the largest micro-batch, which may leave no gradients to accumulate."""
        return Variant(self.gather[-1], self.generation_batch[-1], self.checkpointing[-1], self.micro_batch[0])


@dataclass(frozen=True, slots=True)
class Need:
    """One variant with its memory."""

    setup: Setup
    split: batch.BatchSplit
    prediction: Prediction
    device: int
    """Bytes that one GPU must have."""


class Family:
    """One method on so many processes in one precision, with all its variants."""

    def __init__(self, needs: "Needs", world: int, method: Method, precision: Precision) -> None:
        """Works nothing out yet."""
        self._of, self._world, self.method, self._precision = needs, world, method, precision
        self._knobs = needs.knobs(world, method.zero == 3)
        self._needs: dict[Variant, Need] = {}
        self._host: dict[int, int] = {}

    @cached_property
    def fastest(self) -> Need:
        """The variant that saves no memory."""
        return self._need(self._knobs.fastest)

    @cached_property
    def leanest(self) -> Need:
        """The variant that needs least: with the smallest micro-batch, or one that leaves nothing to accumulate."""
        smallest = self._need(self._knobs.leanest)
        if smallest.setup.accumulates and self._of.split(self._world, self._knobs.micro_batch[0]).once:
            return min(smallest, self._need(self._knobs.fewest_passes), key=lambda need: need.device)
        return smallest

    @property
    def floor(self) -> int:
        """Bytes that the leanest variant needs on a GPU on any number of processes: its passes and nothing else."""
        demand, setup = self._of.demand, self._setup(self._knobs.leanest)
        return device_bytes(self._of.predictor.floor(setup), 1, demand.margin)

    def host(self, processes: int) -> int:
        """Bytes of host memory that a pod of so many processes must have; the same for all variants."""
        if processes not in self._host:
            setup = self._setup(self._knobs.leanest)
            self._host[processes] = host_bytes(self._of.demand.shape, setup, processes)
        return self._host[processes]

    def fitting(self, usable: int) -> Iterator[Need]:
        """For each choice of gathering and checkpointing, the largest generation and micro-batch that fit.

        Generation doesn't depend on how the update runs, so its batch is settled first; not gathering is only tried
        where gathering leaves no room for the whole generation batch.
        """
        knobs, lean = self._knobs, self.leanest.setup
        for gather in knobs.gather:
            sizes = [Variant(gather, size, lean.checkpointing, lean.micro_batch) for size in knobs.generation_batch]
            generated = self._first_fit(sizes, usable)
            if generated is None:
                continue
            size = generated.setup.generation_batch
            for checkpointing in knobs.checkpointing:
                tried = [Variant(gather, size, checkpointing, micro) for micro in knobs.micro_batch]
                need = self._first_fit(tried, usable)
                if need:
                    yield need
            if size == knobs.generation_batch[0]:
                return

    def _first_fit(self, variants: Sequence[Variant], usable: int) -> Need | None:
        """The first variant that fits; they are ordered by falling memory, so bisection finds it."""
        best, low, high = None, 0, len(variants)
        middle = 0
        while low < high:
            need = self._need(variants[middle])
            if need.device <= usable:
                best, high = need, middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return best

    def _need(self, variant: Variant) -> Need:
        """One variant with its numbers."""
        known = self._needs.get(variant)
        if known is None:
            demand, setup = self._of.demand, self._setup(variant)
            prediction = self._of.predictor.predict(setup, demand.scoring_bytes)
            device = device_bytes(prediction, self._world, demand.margin)
            split = self._of.split(self._world, variant.micro_batch)
            known = self._needs[variant] = Need(setup, split, prediction, device)
        return known

    def _setup(self, variant: Variant) -> Setup:
        demand, method = self._of.demand, self.method
        training = demand.spec.training
        return Setup(
            self._precision, training.max_prompt_length, training.max_completion_length, variant.micro_batch,
            self._of.split(self._world, variant.micro_batch).gradient_accumulation, variant.generation_batch,
            self._world, method.zero, method.offload, demand.spec.adapter.rank if method.lora else 0, method.eight_bit,
            variant.checkpointing, variant.gather, method.reference, self._of.updates > 1,
        )  # fmt: skip


class Needs:
    """The families of one demand, whichever pool and search asks for them."""

    def __init__(self, demand: Demand, predictor: Predictor) -> None:
        """Finds nothing yet; `predictor` is the model's, shared with the demands of the fixes."""
        self.demand, self.predictor = demand, predictor
        self.updates = batch.updates_per_generation(demand.spec)
        self._families: dict[tuple[int, Method, Precision], Family] = {}
        self._knobs: dict[tuple[int, bool], Knobs] = {}
        self._splits: dict[tuple[int, int], batch.BatchSplit] = {}
        self._floors: dict[tuple[bool, Precision], int] = {}

    @cached_property
    def worlds(self) -> list[int]:
        """All numbers of processes that split the batch evenly and that the job asks for, ascending."""
        spec = self.demand.spec
        sizes = batch.divisors(batch.step_completions(spec))
        fewest = self.demand.fewest_gpus
        return [size for size in sizes if size >= fewest and batch.micro_batches(spec, size, MOST_SEQUENCES)]

    def of(self, world: int, method: Method, precision: Precision) -> Family:
        """The family of a method on so many processes."""
        key = (world, method, precision)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = Family(self, world, method, precision)
        return family

    def floor(self, method: Method, precision: Precision) -> int:
        """Bytes that a GPU must have at the least for a method, however many there are."""
        key = (method.lora, precision)
        if key not in self._floors:
            self._floors[key] = self.of(self.worlds[0], method, precision).floor
        return self._floors[key]

    def split(self, world: int, micro_batch: int) -> batch.BatchSplit:
        """How one step is cut up."""
        key = (world, micro_batch)
        if key not in self._splits:
            self._splits[key] = batch.split(self.demand.spec, world, micro_batch)
        return self._splits[key]

    def knobs(self, world: int, gathers: bool) -> Knobs:
        """What the spec's pins leave open."""
        key = (world, gathers)
        if key not in self._knobs:
            self._knobs[key] = self._tried(world, gathers)
        return self._knobs[key]

    def _tried(self, world: int, gathers: bool) -> Knobs:
        training = self.demand.spec.training
        micros = tuple(reversed(batch.micro_batches(self.demand.spec, world, MOST_SEQUENCES)))
        saved = {"Auto": (False, True), "Enabled": (True,), "Disabled": (False,)}[training.gradient_checkpointing]
        pinned = training.ds3_gather_for_generation
        gather = {"Auto": (True, False), "Enabled": (True,), "Disabled": (False,)}[pinned] if gathers else (True,)
        whole = self.split(world, micros[0]).generation_batch
        return Knobs(gather, tuple(whole >> bits for bits in range(whole.bit_length())), saved, micros)
