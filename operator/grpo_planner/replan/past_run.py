"""Evaluates a given plan of a job: memory per phase, host memory and seconds per step.

The search goes from a job to plans. This module goes the other way: it takes one plan, or one that
differs a little from it.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import HOST, Learned
from grpo_api.plan.plan import ExecutionPlan, MemoryPhases, MemoryPrediction
from grpo_api.spec.generation import EnginePlan

from ..hardware.inventory import Inventory
from ..hardware.pools import Pool, build_pools, pool_of
from ..hardware.products import CPU, Product, lookup_product
from ..memory.host import host_bytes
from ..memory.phases import Prediction, predict, whole_mib
from ..memory.setup import Engine, Precision, Setup, Strategy
from ..model.architecture import resolve_model
from ..result.formatting import needs_message
from ..search import batch
from ..search.cpu_plan import cpu_pod_bytes, cpu_process_bytes
from ..search.demand import Demand, build_demand, step_fields
from ..search.engine_plan import cpu_engine_plan, engine_plan
from ..search.engines import engine_of, narrower_engines, server_pools
from ..time.measured_runs import StepCorrection, sampler_of
from ..time.step_time import StepTime, step_message, step_time, with_measured_links


@dataclass(frozen=True)
class Run:
    """A plan with its job, and what is known of the memory that it needs."""

    plan: ExecutionPlan
    spec: GRPOJobSpec
    learned: Learned
    inventory: Inventory = field(default_factory=Inventory)
    """Nodes that its pods may be bound to, for what they say of their GPUs' links."""

    @cached_property
    def demand(self) -> Demand:
        """The job's demand."""
        model = resolve_model(self.spec.model, reported=self.learned.architecture)
        return build_demand(self.spec, model, learned=self.learned)

    @cached_property
    def setup(self) -> Setup:
        """The plan as the memory model sees it."""
        plan = self.plan
        training = self.spec.training
        offloaded = plan.strategy == "Sharded" and self.spec.reference.offload
        reference: Strategy = "Offload" if offloaded else plan.strategy
        adapter = self.spec.adapter
        lora_rank = adapter.rank if plan.method == "LoRA" else 0
        lora_targets = tuple(adapter.target_modules)
        has_engine = plan.engine is not None
        return Setup(
            precision=self._precision,
            prompt=training.max_prompt_length,
            prompts=self.learned.prompts,
            completion=training.max_completion_length,
            expected=plan.expected_completion_length or 0,
            micro_batch=plan.micro_batch,
            accumulation=plan.gradient_accumulation,
            generation_batch=self._at_once,
            world=plan.world_size,
            zero=plan.zero_stage,
            offload=plan.offload == "CPU",
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            eight_bit=plan.optimizer == "AdamW8bit",
            checkpointing=plan.gradient_checkpointing,
            sorts_words=training.top_p < 1,
            gather=plan.gather_for_generation,
            reference=reference,
            iterations=training.num_iterations,
            scores_old_policy=batch.should_score_old_policy(self.spec, has_engine=has_engine),
            engine=self._engine,
        )

    @property
    def _precision(self) -> Precision:
        """The plan's dtypes as the memory model names them."""
        if self.plan.dtype == "bfloat16":
            return "bfloat16"
        return "mixed" if self.plan.autocast else "float32"

    @property
    def _engine(self) -> Engine | None:
        """The plan's engine as the memory model sees it."""
        plan = self.plan.engine
        if plan is None:
            return None
        share_bytes = 0
        if plan.kind == "Colocated":
            share = self.spec.generation.memory_share or 0
            share_bytes = int(share * self.usable_bytes)
        engine = engine_of(
            self.demand,
            plan.kind,
            plan.tensor_parallel,
            sleeps=plan.sleep,
            replicas=plan.replicas,
            share=share_bytes,
            model_runner=plan.model_runner,
        )
        return replace(engine, most_sequences=plan.max_sequences, offloads_base=plan.offload_base)

    @property
    def sized_engine(self) -> EnginePlan | None:
        """The plan's engine with the numbers that follow from the plan as it is; one with GPUs of
        its own stays."""
        engine = self.plan.engine
        setup = self.setup
        if engine is None or setup.engine is None or engine.kind == "Servers":
            return engine
        if self.plan.accelerator == "CPU":
            return cpu_engine_plan(self.demand, setup, self.plan.host_memory_bytes)
        sync = self.step_time.sync / setup.engine.syncs
        return engine_plan(self.demand, setup, self.usable_bytes, sync=sync, servers=None)

    def with_engine(self, engine: Engine | None, servers: Pool | None) -> "Run":
        """The same split with another engine, which samples as many at a time as fit, and what that
        takes; None is Transformers, `servers` is where an engine with GPUs of its own is."""
        run = self
        for narrower in narrower_engines(self.spec, engine):
            for at_once in batch.sizes_at_a_time(self.spec, self.plan.world_size, narrower):
                run = self._with_generation_batch(narrower, servers, at_once)
                if run.may_fit():
                    return run
        return run

    def with_published_engine(self, engine: EnginePlan) -> "Run":
        """The same split with this engine, which takes no more of the trainer's GPUs."""
        return self.with_plan(engine=engine)._with_new_numbers(self.setup)

    def _with_generation_batch(
        self, engine: Engine | None, servers: Pool | None, at_once: int
    ) -> "Run":
        """The same split with `at_once` completions of each process at a time."""
        whole = self.plan.micro_batch * self.plan.steps_per_generation
        generates_in_parts = engine is None and at_once < whole
        run = self.with_plan(
            engine=None,
            generation_sub_batch=at_once if generates_in_parts else 0,
            gather_for_generation=True,
        )
        if engine:
            setup = replace(run.setup, engine=engine, generation_batch=at_once)
            run = run.with_plan(engine=self._engine_plan(setup, servers))
        return run._with_new_numbers(self.setup)

    def _engine_plan(self, setup: Setup, servers: Pool | None) -> EnginePlan:
        """The engine of a setup as the plan publishes it, before it is known how long a sync
        takes."""
        if self.plan.accelerator == "CPU":
            return cpu_engine_plan(self.demand, setup, self.plan.host_memory_bytes)
        own_pool = None
        if setup.engine and setup.engine.kind == "Servers":
            own_pool = servers
        usable = own_pool.usable_bytes if own_pool else self.usable_bytes
        return engine_plan(self.demand, setup, usable, sync=None, servers=own_pool)

    def _with_new_numbers(self, before: Setup) -> "Run":
        """The same split with the memory and the time that follow from its plan; `before` is the
        setup that it was made from."""
        plan = self.plan
        processes = plan.processes_per_node
        if plan.memory is None:
            needed = whole_mib(cpu_pod_bytes(self.demand, self.setup, processes))
            return self.with_plan(host_memory_bytes=self.demand.pod_memory or needed)
        shape = self.demand.shape
        host_before = host_bytes(shape, before, processes)
        host_now = host_bytes(shape, self.setup, processes)
        host_per_node = plan.memory.host_bytes_per_node + host_now - host_before
        memory = self.predicted_memory(plan.memory, host_per_node)
        return self.with_plan(memory=memory, engine=self.sized_engine, **self.step_fields)

    def predicted_memory(self, memory: MemoryPrediction, host_per_node: int) -> MemoryPrediction:
        """What the plan publishes of its memory, with what is predicted now."""
        prediction = self.prediction
        numbers = {
            "host_bytes_per_node": host_per_node,
            "phases": MemoryPhases(**prediction.phases),
            "peak_phase": prediction.peak_phase,
            "peak_allocated_bytes": prediction.peak,
            "device_bytes": self.device_bytes,
        }
        return memory.model_copy(update=numbers)

    @property
    def _at_once(self) -> int:
        """Completions of one process that are generated at a time."""
        whole = self.plan.micro_batch * self.plan.steps_per_generation
        engine = self.plan.engine
        if engine is None or engine.kind == "Servers":
            return self.plan.generation_sub_batch or whole
        return ceil(engine.max_sequences / engine.tensor_parallel)

    @cached_property
    def prediction(self) -> Prediction:
        """Of one GPU, with what was learned."""
        demand = self.demand
        uncorrected = predict(demand.shape, self.setup, demand.resident_bytes, demand.scoring_bytes)
        return demand.correct_prediction(uncorrected)

    @property
    def step_seconds(self) -> float:
        """Estimated time of one step on GPUs."""
        return self.step_time.total

    @property
    def step_time(self) -> StepTime:
        """Estimated time of one step on GPUs, by its parts."""
        plan = self.plan
        whole = batch.generation_share(self.spec, self.setup.world)
        calls = batch.generate_calls(self.setup, whole, batch.updates_per_generation(self.spec))
        engine = plan.engine
        servers: Product | None = None
        if engine and engine.kind == "Servers":
            servers = self._hardware(engine.gpu_product, engine.gpu_resource)
        trainers = self._hardware(plan.gpu_product, plan.gpu_resource)
        shape = self.demand.shape
        measured = self.correction
        return step_time(
            shape, self.setup, trainers, plan.nodes, calls, servers=servers, measured=measured
        )

    @property
    def correction(self) -> StepCorrection | None:
        """What the job's attempts measured of steps on the plan's GPUs."""
        plan = self.plan
        sampler = sampler_of(self.setup.engine)
        return self.demand.correction(plan.gpu_product, plan.world_size, plan.nodes, sampler)

    @property
    def step_fields(self) -> dict[str, object]:
        """The fields of a plan that follow from its time."""
        seconds = round(self.step_seconds, 2)
        return {"estimated_step_seconds": seconds, **step_fields(self.correction)}

    @property
    def step_message(self) -> str:
        """How long a step takes, in words."""
        correction = self.correction
        return step_message(self.step_seconds, correction.spread if correction else None)

    @property
    def needs_message(self) -> str:
        """What the plan needs of each GPU, and how long a step takes, in words."""
        phase = self.prediction.peak_phase
        return needs_message(self.device_bytes, self.usable_bytes, phase, self.step_message)

    def _hardware(self, label: str, resource: str) -> Product:
        """The plan's GPUs as their nodes describe them; as the table of products does where no node
        has them now."""
        if self.plan.accelerator == "CPU":
            return CPU
        measured = with_measured_links(self.inventory, self.learned.links)
        nodes = measured.without_usage
        trainer_pools, _ = build_pools(nodes, self.spec)
        engine_pools = server_pools(nodes, self.spec)
        pool = pool_of(trainer_pools + engine_pools, label, resource)
        return pool.hardware if pool else lookup_product(label)

    @property
    def device_bytes(self) -> int:
        """Bytes that one GPU must have."""
        return self.demand.device_bytes(self.prediction, self.plan.world_size)

    @property
    def usable_bytes(self) -> int:
        """Bytes that one GPU has for torch."""
        return self.plan.memory.usable_bytes if self.plan.memory else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of one process."""
        if self.plan.accelerator == "CPU":
            return cpu_process_bytes(self.demand, self.setup)
        predicted = host_bytes(self.demand.shape, self.setup, 1)
        return round(predicted * self.learned.factor(HOST))

    def needed_bytes(self, key: str) -> int:
        """Bytes of one GPU in that phase, or for HOST of one process."""
        return self.host_bytes if key == HOST else self.prediction.phases[key]

    @property
    def host_limit(self) -> int:
        """Bytes of host memory that a process may use by the spec's limit; 0 without one."""
        if "memory" not in self.spec.resources.limits:
            return 0
        pod_limit = self.demand.most_memory or 0
        return pod_limit // self.plan.processes_per_node

    def may_fit(self, room: float = 1.0) -> bool:
        """Return True if the plan fits into the share `room` of the memory, with what was
        learned."""
        if self.plan.accelerator == "CPU":
            limit = self.host_limit
            return not limit or self.host_bytes <= limit * room
        return self.device_bytes <= self.usable_bytes * room

    def with_plan(self, **changes: object) -> "Run":
        """Return the same job with these fields of the plan changed."""
        plan = self.plan.model_copy(update=changes)
        return replace(self, plan=plan)
