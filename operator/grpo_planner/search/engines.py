"""Which vLLM engines a job may have: whether any, and on the GPUs of one place which ones.

An engine samples several times as fast as transformers' generate, from weights that have to be
proven, and takes memory of its own. So what is known of the model decides first, then what fits;
docs/explanation/generation.md says it in full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.generation import (
    PROVEN_FAMILIES,
    TENSOR_PARALLEL,
    EngineArguments,
    EngineServersSpec,
)
from grpo_api.spec.keyword_arguments import LEAST_TEMPERATURE

from ..hardware.inventory import Inventory, declared_inventory
from ..hardware.pools import Place, Pool, build_pools
from ..memory import engine as terms
from ..memory.setup import Engine, Precision, Setup
from ..result.formatting import distinct_gib, gib, plural
from ..result.result import PlanReason, SpecRejected
from .batch import step_completions
from .demand import Demand

OWN_SHARE = 0.9
"""Share of its GPUs that an engine with GPUs of its own takes; the rest is for what vLLM's profile
can't see (assumed)."""
CACHE_ELEMENT = {"auto": 0, None: 0}
"""Bytes of an element of the cache by kv_cache_dtype, 0 as of the weights; all others have one
byte."""
BLOCK = {"GPU": 16, "CPU": 128}
"""Tokens of one block of the cache, vLLM 0.30's own."""
NO_ENGINES_BESIDE = (
    "spec.jobClassName: pods on the node's network can't share a node with engines': set "
    "spec.generation.engine to Colocated or"
)
"""Why a job can't have engines in pods of their own, up to the name of what else can sample."""


def why_none(demand: Demand) -> str:
    """Why Transformers samples for a job, whatever GPUs there are; empty where an engine may."""
    spec, model = demand.spec, demand.model
    if spec.generation.engine == "Transformers":
        return "spec.generation.engine asks for it"
    if demand.has_given_up_engine:
        failure = demand.learned.engine_failures[-1]
        return f"an engine failed in attempt {failure.attempt} ({failure.reason})"
    if spec.generation.engine != "Auto":
        return ""
    if spec.placement.accelerator == "CPU":
        return "on CPUs an engine is no faster"
    if spec.training.temperature < LEAST_TEMPERATURE:
        return f"vLLM samples at no temperature below {LEAST_TEMPERATURE:g}"
    # vLLM fuses the experts of a layer into one tensor of another layout, which no hash of ours can
    # compare yet.
    if model.shape.experts:
        return "the weights of experts in an engine can't be proven yet"
    # An engine is sized by heads, layers and vocabulary, which no number of parameters gives.
    if model.source == "Estimated":
        return "the model's shape is only estimated"
    if model.model_type not in PROVEN_FAMILIES:
        return (
            f"the weights of model type {model.model_type or 'unknown'} in an engine have not "
            "been proven"
        )
    # An engine that its image lacks would show only when the gang holds its GPUs.
    if spec.image and demand.learned.has_vllm is False:
        return "spec.image has no vLLM: install the one that the trainer's image has"
    if spec.image and demand.learned.has_vllm is None:
        return (
            "whether spec.image has vLLM is not known: if it has, set spec.generation.engine to "
            "Colocated"
        )
    return ""


def check(demand: Demand) -> None:
    """Refuse a spec whose requested engine is impossible.

    Raises:
        SpecRejected: with what to change.
    """
    spec = demand.spec
    wanted, engine = spec.generation, spec.generation.engine
    if wanted.max_model_length and wanted.max_model_length < demand.length:
        raise SpecRejected(
            PlanReason.INVALID_COMBINATION,
            f"spec.generation.maxModelLength {wanted.max_model_length} is less than "
            "training.maxPromptLength "
            f"{spec.training.max_prompt_length} + maxCompletionLength "
            f"{spec.training.max_completion_length} = "
            f"{demand.length}: remove it, or lower one of them",
        )
    is_asked_for = engine in ("Colocated", "Servers")
    if is_asked_for and (why := _why_vllm_can_not(demand)):
        removed = "".join(f" and remove {path}" for path in settings_of_engines(spec))
        raise SpecRejected(PlanReason.INVALID_COMBINATION, f"{why} Transformers{removed}")
    if spec.placement.accelerator == "CPU":
        return
    field = "tensorParallel"
    gpus: int = wanted.tensor_parallel or 1
    if engine == "Servers":
        servers = wanted.servers or EngineServersSpec()
        field, gpus = "servers.gpusPerReplica", servers.gpus_per_replica
    if is_asked_for and (why := _split_misfit(demand, field, gpus)):
        raise SpecRejected(PlanReason.INVALID_COMBINATION, why)
    # The gang is a multiple of its engines' GPUs, and the batch a multiple of the gang.
    completions = step_completions(spec)
    if engine == "Colocated" and completions % gpus:
        raise SpecRejected(
            PlanReason.INVALID_BATCH_SPLIT,
            f"spec.generation.tensorParallel {gpus}: {completions} completions per step can't be "
            f"split over a multiple of {gpus} GPUs: lower or remove it, or change "
            "spec.training.promptsPerStep",
        )


def _why_vllm_can_not(demand: Demand) -> str:
    """Why vLLM can't sample for the job, up to the name of what can; empty where it can."""
    spec, experts = demand.spec, demand.shape.experts
    if spec.training.temperature < LEAST_TEMPERATURE:
        return (
            f"spec.training.temperature {spec.training.temperature:g}: vLLM samples at "
            f"{LEAST_TEMPERATURE:g} or above: raise it, or set spec.generation.engine to"
        )
    if experts:
        return (
            f"spec.generation.engine {spec.generation.engine}: vLLM keeps layers of experts in a "
            f"layout of its own, which can't be proven yet, and {spec.model.name} has {experts} "
            "experts per layer: set it to"
        )
    if spec.platform.host_network and spec.generation.engine == "Servers":
        return NO_ENGINES_BESIDE
    return ""


def settings_of_engines(spec: GRPOJobSpec) -> list[str]:
    """Paths of the settings that have to be removed for Transformers to sample."""
    without = spec.generation.model_copy(update={"engine": "Transformers"})
    return without.settings_of_other_engines()


def is_splittable(demand: Demand, gpus: int) -> bool:
    """Return True if `gpus` GPUs can share the model's heads."""
    shape = demand.shape
    # vLLM repeats key heads where there are fewer of them than GPUs.
    whole = shape.kv_heads % gpus == 0 or gpus % shape.kv_heads == 0
    return shape.heads % gpus == 0 and shape.intermediate % gpus == 0 and whole


def _split_misfit(demand: Demand, field: str, gpus: int) -> str:
    """Why the GPUs of a field of spec.generation can't share the model's heads; empty where they
    can."""
    if is_splittable(demand, gpus):
        return ""
    counts = ", ".join(str(count) for count in TENSOR_PARALLEL if is_splittable(demand, count))
    return (
        f"spec.generation.{field} {gpus}: {demand.shape.heads} heads and {demand.shape.kv_heads} "
        f"key heads can't be split over {gpus} GPUs; {counts} can"
    )


class Engines:
    """The engines of one demand on the pools of one inventory."""

    def __init__(self, demand: Demand, others: Sequence[Pool] = ()) -> None:
        """`others`: pools with spec.generation.servers.gpuProduct; empty if servers have the
        trainer's product."""
        self._demand, self._others = demand, others
        self._engines_by_key: dict[tuple[object, ...], tuple[Engine | None, ...]] = {}
        self._engines_with_room: dict[tuple[int, Precision, int], list[Engine | None]] = {}
        self._bytes: dict[tuple[int, Precision], int] = {}

    @cached_property
    def why_none(self) -> str:
        """Why Auto is Transformers here, whatever fits; empty where it may be an engine."""
        return why_none(self._demand)

    @cached_property
    def may_have_own_gpus(self) -> bool:
        """True if engines may have GPUs beside the trainer's."""
        # Auto may choose Servers that the spec declares: how many is the user's to say.
        spec = self._demand.spec
        may_choose = spec.generation.engine == "Auto" and not spec.platform.host_network
        return self._asks_servers or (may_choose and bool(spec.generation.servers))

    def candidates(
        self, place: Place, precision: Precision, *, may_offload_base: bool = False
    ) -> tuple[Engine | None, ...]:
        """All engines that may sample in a place; None among them means Transformers.

        `may_offload_base`: a sleeping engine may use the room of the policy's frozen base.
        """
        if self.why_none:
            return (None,)
        # A share and servers depend on a pool's bytes and nodes. All other engines depend only on
        # the GPUs per node, so pools of many products share them.
        pool = place.pool if self._depend_on_pool else None
        nodes = place.nodes if pool else 0
        key = (place.per_node, precision, pool, nodes, may_offload_base)
        if key not in self._engines_by_key:
            self._engines_by_key[key] = tuple(self._candidates(place, precision, may_offload_base))
        return self._engines_by_key[key]

    @cached_property
    def _depend_on_pool(self) -> bool:
        return bool(self._demand.spec.generation.memory_share) or self.may_have_own_gpus

    def _candidates(
        self, place: Place, precision: Precision, may_offload_base: bool
    ) -> Iterator[Engine | None]:
        if not self._asks_servers:
            for engine in self._colocated_engines(place, precision):
                yield engine
                if may_offload_base and engine.sleeps:
                    yield replace(engine, offloads_base=True)
        if self.may_have_own_gpus:
            yield from self._servers(place, precision)
        if self._demand.spec.generation.engine in ("Auto", "Transformers"):
            yield None

    @property
    def _model_runner(self) -> Literal["Auto", "V1"]:
        """V1 once another engine of the job has failed."""
        return "V1" if self._demand.learned.rung else "Auto"

    @property
    def _asks_servers(self) -> bool:
        return self._demand.spec.generation.engine == "Servers"

    def _colocated_engines(self, place: Place, precision: Precision) -> Iterator[Engine]:
        """Engines on the processes' own GPUs: one for each, or one that neighbours on a node share;
        asleep while training, or awake."""
        wanted = self._demand.spec.generation
        share = int((wanted.memory_share or 0) * place.pool.usable_bytes)
        naps = (True, False) if wanted.sleep is None else (wanted.sleep,)
        for gpus in TENSOR_PARALLEL:
            is_open = wanted.tensor_parallel in (None, gpus)
            # The GPUs of one engine are on one node: they exchange activations in every layer of
            # every token.
            can_share = place.per_node % gpus == 0 and is_splittable(self._demand, gpus)
            if not (is_open and can_share):
                continue
            candidate_engines = (
                engine_of(
                    self._demand,
                    "Colocated",
                    gpus,
                    sleeps=sleeps,
                    share=share,
                    model_runner=self._model_runner,
                )
                for sleeps in naps
            )
            # An engine that can't sleep is the same twice.
            for engine in dict.fromkeys(candidate_engines):
                if not share:
                    yield engine
                elif room := self._completion_capacity(engine, precision, share):
                    yield _at_most(engine, room)

    def _servers(self, place: Place, precision: Precision) -> Iterator[Engine]:
        """The engine in pods of its own, where there are GPUs for it beside the place."""
        servers, pool = self._server_spec, self.server_pool(place)
        if pool is None or not is_splittable(self._demand, servers.gpus_per_replica):
            return
        engine = engine_of(
            self._demand,
            "Servers",
            servers.gpus_per_replica,
            replicas=servers.replicas,
            model_runner=self._model_runner,
        )
        if room := self._completion_capacity(engine, precision, int(OWN_SHARE * pool.usable_bytes)):
            yield _at_most(engine, room)

    def server_pool(self, place: Place) -> Pool | None:
        """The pool for engines in pods of their own; None if it has too few GPUs."""
        servers = self._server_spec
        pools = self._others if servers.gpu_product else [place.pool]
        # An autoscaler makes the nodes that are asked for, so there is no number to compare with.
        if self._demand.spec.placement.provisioning == "CreatePods":
            return next(iter(pools), None)
        return next(
            (
                pool
                for pool in pools
                if _slots(pool, place, servers.gpus_per_replica) >= servers.replicas
            ),
            None,
        )

    @property
    def _server_spec(self) -> EngineServersSpec:
        return self._demand.spec.generation.servers or EngineServersSpec()

    def with_room(
        self, candidates: tuple[Engine | None, ...], place: Place, precision: Precision
    ) -> list[Engine | None]:
        """The engines among the candidates of a place that one of its GPUs has room for."""
        # Places of one pool share their engines.
        key = (id(candidates), precision, place.pool.usable_bytes)
        if key not in self._engines_with_room:
            self._engines_with_room[key] = [
                engine
                for engine in candidates
                if engine is None or self._has_room(engine, place, precision)
            ]
        return self._engines_with_room[key]

    def _has_room(self, engine: Engine, place: Place, precision: Precision) -> bool:
        """True if a GPU of a place has room for an engine and nothing else."""
        if engine.kind == "Servers" or engine.share:
            return True
        key = (engine.tensor_parallel, precision)
        if key not in self._bytes:
            setup = self._single_completion_setup(engine, precision)
            self._bytes[key] = terms.awake_bytes(self._demand.shape, setup)
        return self._bytes[key] <= place.pool.usable_bytes

    def _completion_capacity(self, engine: Engine, precision: Precision, share: int) -> int:
        return terms.cached_completions(
            self._demand.shape, self._single_completion_setup(engine, precision), share
        )

    def _single_completion_setup(self, engine: Engine, precision: Precision) -> Setup:
        """What an engine takes by itself, of one completion."""
        training = self._demand.spec.training
        return Setup(
            precision=precision, prompt=training.max_prompt_length,
            prompts=self._demand.learned.prompts,
            completion=training.max_completion_length,
            expected=self._demand.expected_completion,
            micro_batch=1, engine=engine,
        )  # fmt: skip

    def misfit(self, pools: Sequence[Pool]) -> str:
        """Why an engine that is asked for has no place on any of these pools, in numbers; empty
        where it has."""
        engine = self._demand.spec.generation.engine
        if engine == "Colocated":
            return self.colocated_misfit(pools)
        return self._servers_misfit(pools) if engine == "Servers" else ""

    def colocated_misfit(self, pools: Sequence[Pool]) -> str:
        """The same of an engine on the processes' GPUs, whether or not it is asked for."""
        wanted = self._demand.spec.generation
        gpus = wanted.tensor_parallel or 1
        most = max((pool.most_gpus_per_node for pool in pools), default=0)
        if why := _split_misfit(self._demand, "tensorParallel", gpus):
            return why
        if gpus > most:
            return (
                f"spec.generation.tensorParallel {gpus}: an engine's GPUs are on one node, and "
                f"none has more than {most}: lower or remove it"
            )
        if wanted.memory_share and pools:
            usable = pools[0].usable_bytes
            return (
                f"spec.generation.memoryShare {wanted.memory_share:g} of {gib(usable)} is too "
                "little for an engine, "
                f"whose weights, graphs and one completion take {gib(self._least_bytes(gpus))}: "
                "raise or remove it"
            )
        return ""

    def _servers_misfit(self, pools: Sequence[Pool]) -> str:
        """The same of engines in pods of their own: their GPUs are too small or too few."""
        servers, gpus = self._server_spec, self._server_spec.gpus_per_replica
        own_pools = self._others if servers.gpu_product else pools
        usable = max((pool.usable_bytes for pool in own_pools), default=0)
        needed, room = self._least_bytes(gpus), int(OWN_SHARE * usable)
        of_product = f" of product {servers.gpu_product}" if servers.gpu_product else ""
        missing, ways = "these nodes have too few GPUs", []
        if own_pools and needed > room:
            takes, has = distinct_gib(needed, room)
            missing = f"one takes {takes} of each GPU at least, of which it may have {has}"
            ways.append("raise servers.gpusPerReplica")
        elif servers.replicas > 1:
            ways.append("lower servers.replicas")
        ways.append("set spec.generation.engine to Auto")
        return (
            f"spec.generation.servers asks for {plural(servers.replicas, 'engine')} with "
            f"{plural(gpus, 'GPU')} each beside the trainer's{of_product}: {missing}; "
            f"{' or '.join(ways)}"
        )

    def _least_bytes(self, gpus: int) -> int:
        """Bytes of one GPU that an engine takes for one completion."""
        engine = engine_of(self._demand, "Colocated", gpus)
        return terms.awake_bytes(
            self._demand.shape, self._single_completion_setup(engine, "bfloat16")
        )


def engine_of(
    demand: Demand,
    kind: Literal["Colocated", "Servers"],
    gpus: int,
    *,
    sleeps: bool = False,
    replicas: int = 0,
    share: int = 0,
    model_runner: Literal["Auto", "V1"] = "Auto",
) -> Engine:
    """An engine with the settings of spec.generation; the arguments are fields of Engine."""
    spec = demand.spec
    arguments = spec.generation.engine_arguments or EngineArguments()
    limits = (arguments.max_num_seqs, spec.generation.sequences_at_a_time)
    on_gpu = spec.placement.accelerator == "GPU"
    length = spec.generation.max_model_length or demand.length
    # Model runner V1 serves engines that have failed otherwise. It has neither sleep nor graphs,
    # whatever the spec says, so that neither can be the cause again.
    has_extras = on_gpu and model_runner == "Auto"
    return Engine(
        kind=kind,
        length=length,
        tensor_parallel=gpus,
        replicas=replicas,
        sleeps=sleeps and has_extras,
        share=share,
        most_sequences=min(filter(None, limits), default=0),
        graphs=has_extras and not arguments.enforce_eager,
        model_runner=model_runner,
        pass_tokens=arguments.pass_tokens(length),
        block=arguments.block_size or BLOCK[spec.placement.accelerator],
        cache_bytes=CACHE_ELEMENT.get(arguments.kv_cache_dtype, 1),
        syncs=1 / demand.updates_per_generation,
    )


def narrower_engines(spec: GRPOJobSpec, engine: Engine | None) -> Iterator[Engine | None]:
    """An engine, then the same with ever fewer completions at a time than it has GPUs, by halves,
    where that may save memory: for where no GPU has room for one completion of each."""
    yield engine
    is_pinned = spec.generation.sequences_at_a_time is not None
    if engine is None or engine.kind == "Servers" or engine.share or is_pinned:
        return
    gpus = engine.tensor_parallel
    at_once = min(gpus, engine.most_sequences or gpus) // 2
    while at_once:
        yield replace(engine, most_sequences=at_once)
        at_once //= 2


def server_pools(inventory: Inventory, spec: GRPOJobSpec) -> list[Pool]:
    """The pools of engines that have a product of their own; none where theirs is the trainer's."""
    servers = spec.generation.servers
    if servers is None or servers.gpu_product is None:
        return []
    placement = spec.placement.model_copy(update={"gpu_product": servers.gpu_product})
    if placement.provisioning == "CreatePods":
        inventory = declared_inventory(placement)
    return build_pools(inventory, spec.model_copy(update={"placement": placement}))[0]


def _at_most(engine: Engine, room: int) -> Engine:
    """The engine with no more completions at a time than there is room for."""
    return replace(engine, most_sequences=min(room, engine.most_sequences or room))


def _slots(pool: Pool, place: Place, gpus: int) -> int:
    """Engines of `gpus` GPUs each that a pool has room for beside a gang."""
    # A gang that takes a part of a node may leave GPUs that no engine fits in. Which nodes it gets
    # is not known yet, so each counts as cut up worst.
    there = sum(room.gpus // gpus * count for room, count in pool.rooms)
    is_shared = pool.is_same(place.pool)
    return there - (place.nodes * -(-place.per_node // gpus) if is_shared else 0)
