"""Footprints: what each way of running a job takes, whichever GPUs it would run on.

Memory depends on the number of processes and the settings alone. So pools of many products share
these numbers. So do all the searches of one plan: on free nodes, on emptied nodes and for each fix.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import HOST

from ..hardware.pools import Place
from ..memory import engine as terms
from ..memory.host import PodBytes, pod_bytes
from ..memory.phases import Prediction, Predictor
from ..memory.setup import Engine, Precision, Setup, copy_with
from ..memory.states import static_bytes
from . import batch
from .demand import Demand
from .methods import Method

NOWHERE = Engine(kind="Servers", length=1)
"""An engine that takes nothing of the trainer's GPUs."""
Settings = tuple[bool, int, bool, int]
"""One value of each of Knobs, in its order."""
Update = tuple[bool, int]
"""The last two settings: whether an update recomputes, and its micro-batch."""


class Knobs(NamedTuple):
    """The values to try of each setting that trades memory for time, from fastest to leanest."""

    gather: tuple[bool, ...]
    generation_batch: tuple[int, ...]
    checkpointing: tuple[bool, ...]
    micro_batch: tuple[int, ...]

    @property
    def fastest(self) -> Settings:
        """The settings that save no memory."""
        return self.gather[0], self.generation_batch[0], self.checkpointing[0], self.micro_batch[0]

    @property
    def leanest(self) -> Settings:
        """The settings that save the most memory."""
        return (
            self.gather[-1],
            self.generation_batch[-1],
            self.checkpointing[-1],
            self.micro_batch[-1],
        )


class Footprint(NamedTuple):
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

    def __init__(self, of: "Footprints", family: "Family", engine: Engine | None) -> None:
        """Works nothing out yet."""
        self._demand = of.demand
        self._predictor, self._template, self.engine = of.predictor, family.template, engine
        self._world, self._method, self._whole = family.world, family.method, family.whole
        self._scores_old_policy = of.scores_old_policy[engine is not None]
        gathers = family.method.zero == 3 and engine is None
        self._knobs = of.knobs(family.world, engine, gathers=gathers)
        self._alone = family[None] if engine else self
        self._footprints: dict[Settings, Footprint] = {}
        self._setups: dict[Settings, Setup] = {}
        self._host: dict[int, int] = {}
        self._training: dict[tuple[bool, int], int] = {}
        self._largest_updates: dict[tuple[bool, int], int] = {}
        self._resting = of.resting_bytes(engine, family.precision)

    @cached_property
    def fastest(self) -> Footprint:
        """The variant that saves no memory."""
        return self._footprint(self._knobs.fastest)

    @cached_property
    def quickest(self) -> tuple[Setup, float]:
        """Setup and calls of generate of the fastest variant, whose time is a bound that needs no
        prediction."""
        setup = self._setup(self._knobs.fastest)
        return setup, self.calls(setup)

    def smaller_batches(self, setup: Setup) -> tuple[int, ...]:
        """Generation batches below that of a setup, largest first. They fit wherever it fits."""
        sizes = self._knobs.generation_batch
        return sizes[bisect_left(sizes, True, key=lambda size: size < setup.generation_batch) :]

    def with_batch(self, setup: Setup, generation_batch: int) -> Setup:
        """A setup with another generation batch."""
        return self._setup((setup.gather, generation_batch, setup.checkpointing, setup.micro_batch))

    def footprint_of(self, setup: Setup) -> Footprint:
        """The variant with the settings of a setup."""
        return self._footprint(
            (setup.gather, setup.generation_batch, setup.checkpointing, setup.micro_batch)
        )

    @cached_property
    def leanest(self) -> Footprint:
        """The variant that takes least of a GPU."""
        # The smallest micro-batch saves activations but keeps gradients while the others are
        # accumulated. Where the largest is a process's whole share of a step, no gradient waits,
        # which may save more than it costs.
        smallest, largest = self._footprint(self._knobs.leanest), self._knobs.micro_batch[0]
        if (
            smallest.setup.is_accumulating
            and batch.accumulation(self._demand.spec, self._world, largest) == 1
        ):
            at_once = self._footprint((*self._knobs.leanest[:3], largest))
            return min(smallest, at_once, key=lambda footprint: footprint.device)
        return smallest

    def may_train(self, usable: int) -> bool:
        """True if training has room at some setting, whatever samples the completions."""
        return any(size <= usable for size in self._leanest_trainings)

    @property
    def least_training_bytes(self) -> int:
        """The least bytes of a GPU that training takes at some setting."""
        return min(self._leanest_trainings)

    @property
    def _leanest_trainings(self) -> Iterator[int]:
        """The bytes of training at each end of the micro-batches, at one of which they are least:
        the smallest has the least activations, the largest may accumulate nothing."""
        sizes = self._knobs.micro_batch
        recomputes = self._knobs.checkpointing[-1]
        ends = (sizes[-1], sizes[0])
        return (self.training_bytes(recomputes, size) for size in ends)

    def largest_update(self, recomputes: bool, usable: int) -> int:
        """The largest micro-batch of which training alone fits, whatever samples the completions;
        0 where none does."""
        key = (recomputes, usable)
        if key not in self._largest_updates:
            sizes = self._knobs.micro_batch

            def fits(size: int) -> bool:
                return self.training_bytes(recomputes, size) <= usable

            # The largest may be a whole share, which accumulates nothing and so may fit where a
            # smaller one does not.
            first = 0 if fits(sizes[0]) else bisect_left(sizes, True, lo=1, key=fits)
            self._largest_updates[key] = sizes[first] if first < len(sizes) else 0
        return self._largest_updates[key]

    def fastest_updates(self, usable: int) -> list[Update]:
        """Whether the fastest updates that fit recompute, and their micro-batches: of the choices
        of checkpointing those with a larger one than the choices that are faster."""
        updates: list[Update] = []
        largest = 0
        for recomputes in self._knobs.checkpointing:
            if largest < self._knobs.micro_batch[0]:
                size = self.largest_update(recomputes, usable)
                if size > largest:
                    updates.append((recomputes, size))
                    largest = size
        return updates

    def update_setup(self, update: Update) -> Setup:
        """The fastest setup with an update."""
        return self._setup((*self._knobs.fastest[:2], *update))

    def training_bytes(self, recomputes: bool, micro_batch: int) -> int:
        """Bytes of a GPU that training takes with everything else that saves memory."""
        key = (recomputes, micro_batch)
        if key not in self._training:
            # Under ZeRO-3 parameters that are not gathered to generate take less in training, too.
            # So this bounds training beside any sampler.
            gathers = self._method.zero != 3
            settings = (gathers, self._knobs.generation_batch[-1], recomputes, micro_batch)
            setup = self._setup(settings)
            prediction = self._demand.correct_prediction(self._predictor.training(setup))
            self._training[key] = self._demand.device_bytes(prediction, self._world)
        return self._training[key]

    @property
    def floor(self) -> int:
        """Bytes that the leanest variant takes of a GPU on any number of processes: its passes and
        nothing else."""
        setup = self._setup(self._knobs.leanest)
        return self._demand.device_bytes(self._predictor.floor(setup), 1)

    @cached_property
    def _pod_bytes(self) -> PodBytes:
        return pod_bytes(self._demand.shape, self._setup(self._knobs.leanest))

    def host(self, processes: int) -> int:
        """Bytes of host memory that a pod of `processes` processes must have; the same for all
        variants."""
        if processes not in self._host:
            bare = self._pod_bytes.total(processes)
            processes_bytes = round(bare * self._demand.learned.factor(HOST))
            self._host[processes] = processes_bytes + self._demand.tracker_bytes
        return self._host[processes]

    def fitting(self, usable: int, may_win: Callable[[Update], bool]) -> Iterator[Setup]:
        """For each choice of gathering and checkpointing the pairs of micro-batch and generation
        batch that fit, of which neither can be larger: larger ones are faster.

        `may_win`: whether an update is still of use, of those that come next.
        """
        for gather in self._knobs.gather:
            sizes = self._generation_batches(gather, usable)
            yield from self._fitting_pairs(gather, sizes, usable, may_win)

    def _fitting_pairs(
        self, gather: bool, sizes: Sequence[int], usable: int, may_win: Callable[[Update], bool]
    ) -> Iterator[Setup]:
        """Pairs as of `fitting` for one gathering; `sizes`: generation batches, largest first."""
        knobs = self._knobs
        worth = len(sizes)
        for recomputes in knobs.checkpointing:
            # An engine takes memory, so training alone has the largest micro-batches.
            largest = self._alone.largest_update(recomputes, usable)
            later = worth
            for micro_batch in knobs.micro_batch:
                if micro_batch > largest or not may_win((recomputes, micro_batch)):
                    continue
                index = self._first_fit(gather, sizes[:later], recomputes, micro_batch, usable)
                if index == later:
                    continue
                yield self._setup((gather, sizes[index], recomputes, micro_batch))
                if self.engine is None:
                    for size in batch.evener_sizes(self._whole, sizes[index:]):
                        yield self._setup((gather, size, recomputes, micro_batch))
                is_largest = micro_batch == knobs.micro_batch[0]
                if is_largest and not recomputes:
                    # A smaller generation batch can't make the fastest update any faster.
                    worth = index
                # Smaller micro-batches fit beside this generation batch, too. But a whole share
                # accumulates nothing and so may fit where a smaller one does not.
                later = later if is_largest else index
                if index == 0:
                    break

    def _generation_batches(self, gather: bool, usable: int) -> Sequence[int]:
        """The generation batches that may be the best beside some update."""
        sizes = self._knobs.generation_batch
        engine = self.engine
        if engine and engine.kind == "Colocated" and not (engine.sleeps or engine.share):
            return sizes
        # What generates leaves before the update, but for an engine that stays awake. So without
        # one every update fits beside the largest generation batch that fits.
        lean = self.leanest.setup
        first = self._first_fit(gather, sizes, lean.checkpointing, lean.micro_batch, usable)
        return sizes[first:]

    def _first_fit(
        self, gather: bool, sizes: Sequence[int], recomputes: bool, micro_batch: int, usable: int
    ) -> int:
        """Index of the first generation batch of `sizes`, largest first, that fits; their number
        if none does. Bisection predicts few of them."""

        def fits(size: int) -> bool:
            return self._footprint((gather, size, recomputes, micro_batch)).device <= usable

        # What training alone and an engine that stays awake take together is a bound that needs no
        # prediction, and mostly the first that it lets through fits.
        room = usable - self._alone.training_bytes(recomputes, micro_batch)
        least = bisect_left(sizes, True, key=lambda size: self._engine_bytes(size) <= room)
        if least == len(sizes) or fits(sizes[least]):
            return least
        return bisect_left(sizes, True, lo=least + 1, key=fits)

    def _engine_bytes(self, generation_batch: int) -> int:
        """Bytes of a GPU that an engine adds to training, with what is kept free of them."""
        if self.engine is None:
            return 0
        if self.engine.sleeps:
            # Its cache is for no completion while the policy is trained.
            generation_batch = self._knobs.generation_batch[-1]
        engine_bytes = self._resting.get(generation_batch)
        if engine_bytes is None:
            settings = (*self._knobs.leanest[:1], generation_batch, *self._knobs.leanest[2:])
            setup = self._setup(settings)
            resting = terms.resting_bytes(self._demand.shape, setup)
            # Less one byte, since both sums are rounded.
            engine_bytes = int(resting * (1 + self._demand.margin)) - 1
            self._resting[generation_batch] = engine_bytes
        return engine_bytes

    def _footprint(self, settings: Settings) -> Footprint:
        """One variant with its numbers."""
        footprint = self._footprints.get(settings)
        if footprint is None:
            demand, setup = self._demand, self._setup(settings)
            prediction = demand.correct_prediction(
                self._predictor.predict(setup, demand.scoring_bytes)
            )
            footprint = self._footprints[settings] = Footprint(
                method=self._method,
                setup=setup,
                prediction=prediction,
                device=demand.device_bytes(prediction, self._world),
                calls=self.calls(setup),
            )
        return footprint

    def calls(self, setup: Setup) -> float:
        """Calls of generate per optimizer step."""
        return batch.generate_calls(setup, self._whole, self._demand.updates_per_generation)

    def full_calls(self, setup: Setup) -> float:
        """Calls per optimizer step, where a last call that is not full counts as a part of one."""
        return self._whole / setup.generation_batch / self._demand.updates_per_generation

    def _setup(self, settings: Settings) -> Setup:
        setup = self._setups.get(settings)
        if setup is None:
            gather, generation_batch, checkpointing, micro_batch = settings
            setup = self._setups[settings] = copy_with(
                self._template,
                micro_batch=micro_batch,
                accumulation=self._template.accumulation // micro_batch,
                generation_batch=generation_batch,
                checkpointing=checkpointing,
                gather=gather,
                scores_old_policy=self._scores_old_policy,
                engine=self.engine,
            )
        return setup


class Family(dict[Engine | None, Variants]):
    """One method on a number of processes in one precision, by engine."""

    def __init__(self, of: "Footprints", world: int, method: Method, precision: Precision) -> None:
        """Works nothing out yet but what all its setups share."""
        super().__init__()
        self._of, self.world, self.method, self.precision = of, world, method, precision
        spec = of.demand.spec
        self.whole = batch.generation_share(spec, world)
        """Completions that a process generates for one generation batch."""
        self.template = copy_with(
            of.template,
            precision=precision,
            accumulation=batch.accumulation(spec, world, 1),
            world=world,
            zero=method.zero,
            offload=method.offload,
            lora_rank=spec.adapter.rank if method.lora else 0,
            eight_bit=method.eight_bit,
            reference=method.reference,
        )

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a GPU, with their margin, that the states of the method take in every phase."""
        demand = self._of.demand
        return int(static_bytes(demand.shape, self.template) * (1 + demand.margin))

    def with_memory(self, candidates: Sequence[Engine | None], place: Place) -> list[Engine | None]:
        """The engines among the candidates of a place beside which a node has enough host memory;
        None for Transformers."""
        has_memory: dict[tuple[str, bool] | None, bool] = {}
        fitting: list[Engine | None] = []
        for engine in candidates:
            # What an engine takes of the host depends on no more of it.
            sort = (engine.kind, engine.offloads_base) if engine else None
            if sort not in has_memory:
                has_memory[sort] = self[engine].host(place.per_node) <= place.host_memory
            if has_memory[sort]:
                fitting.append(engine)
        return fitting

    def __missing__(self, engine: Engine | None) -> Variants:
        variants = self[engine] = Variants(self._of, self, engine)
        return variants


class Footprints:
    """The variants of one demand, cached for every pool and search."""

    def __init__(self, demand: Demand, predictor: Predictor) -> None:
        """Works nothing out yet; `predictor` is the model's, shared with the demands of the
        fixes."""
        self.demand, self.predictor = demand, predictor
        self.scores_old_policy = [
            batch.should_score_old_policy(demand.spec, has_engine=has_engine)
            for has_engine in (False, True)
        ]
        self._families: dict[tuple[int, Method, Precision], Family] = {}
        self._knobs: dict[tuple[int, Engine | None, bool], Knobs] = {}
        self._resting: dict[tuple[Engine | None, Precision], dict[int, int]] = {}
        self._floors: dict[tuple[bool, Precision, bool], int] = {}

    def with_spec(self, spec: GRPOJobSpec) -> "Footprints":
        """Footprints of the same job with another spec, with the cached facts of its model and
        memory."""
        return Footprints(self.demand.with_spec(spec), self.predictor)

    @cached_property
    def template(self) -> Setup:
        """What all setups share."""
        demand, spec = self.demand, self.demand.spec
        return Setup(
            precision="bfloat16",
            prompt=spec.training.max_prompt_length,
            prompts=demand.learned.prompts,
            completion=spec.training.max_completion_length,
            expected=demand.expected_completion,
            micro_batch=1,
            lora_targets=tuple(spec.adapter.target_modules),
            sorts_words=spec.training.top_p < 1,
            iterations=spec.training.num_iterations,
        )

    @cached_property
    def worlds(self) -> list[int]:
        """All numbers of processes that split the batch evenly and that the job asks for,
        ascending."""
        spec, fewest = self.demand.spec, self.demand.fewest_gpus
        sizes = batch.divisors(batch.step_completions(spec))
        return [size for size in sizes if size >= fewest and batch.micro_batches(spec, size)]

    def family(self, world: int, method: Method, precision: Precision) -> Family:
        """The variants of a method on `world` processes with every engine."""
        key = (world, method, precision)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = Family(self, world, method, precision)
        return family

    def least_world(
        self, method: Method, precision: Precision, usable: int, *, engined: bool = False
    ) -> float:
        """Lower bound of the GPUs with `usable` bytes each that have room for the states and the
        passes of a method; infinite if none. `engined`: an engine generates in its place, whose
        bytes are not counted."""
        # What the passes take is least with most processes, whose shares of a generation are the
        # smallest, and of a method it depends on whether an adapter is trained. So one prediction
        # does for all sizes of all pools.
        key = (method.lora, precision, engined)
        if key not in self._floors:
            engine = NOWHERE if engined else None
            family = self.family(self.worlds[-1], method, precision)
            self._floors[key] = family[engine].floor
        room = usable - self._floors[key]
        # ZeRO's states take less of each GPU with more of them. Without it they take no less.
        worlds = self.worlds if method.zero else self.worlds[:1]

        def fits(world: int) -> bool:
            return self.family(world, method, precision).state_bytes <= room

        index = bisect_left(worlds, True, key=fits)
        return worlds[index] if index < len(worlds) else inf

    def resting_bytes(self, engine: Engine | None, precision: Precision) -> dict[int, int]:
        """What is known of the bytes that an engine takes while the policy is trained, by
        completions of a process at a time; the same for all methods and numbers of processes."""
        return self._resting.setdefault((engine, precision), {})

    def knobs(self, world: int, engine: Engine | None, *, gathers: bool) -> Knobs:
        """The settings that the spec's pins leave open; `gathers` under ZeRO-3, the only stage with
        parameters to gather."""
        key = (world, engine, gathers)
        if key not in self._knobs:
            self._knobs[key] = self._open_knobs(*key)
        return self._knobs[key]

    def _open_knobs(self, world: int, engine: Engine | None, gathers: bool) -> Knobs:
        spec = self.demand.spec
        pinned = {"Auto": (False, True), "Enabled": (True,), "Disabled": (False,)}
        gather = (
            tuple(reversed(pinned[spec.training.ds3_gather_for_generation])) if gathers else (True,)
        )
        return Knobs(
            gather=gather,
            generation_batch=batch.sizes_at_a_time(spec, world, engine),
            checkpointing=pinned[spec.training.gradient_checkpointing],
            micro_batch=tuple(reversed(batch.micro_batches(spec, world))),
        )
