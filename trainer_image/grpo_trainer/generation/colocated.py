"""A vLLM engine in every training process, on the process's own GPU (TRL's mode "colocate").

The engine is made without weights: the first sync brings them, as every later one does. Where the
plan says so, it gives its memory back while the policy is trained. That is vLLM's sleep level 2,
which forgets the weights, so they are sent again before it samples. With tensor parallelism the
processes of neighbouring ranks share an engine's weights, and each proves its own part.

Where the plan offloads the base, the frozen part of a LoRA policy is in host memory for as long as
the engine is awake. That is from before it starts until it sleeps, and again from before it wakes.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from grpo_api.spec.generation import GenerationSpec

from ..engine_pod.engine_start import error_for_choice, start_engine
from ..engine_pod.hash_check import differing_names, expected_prints, new_seed
from ..engine_pod.vllm_arguments import (
    AFTER_SAMPLER,
    NO_VLLM,
    engine_environment,
    gpu_capability,
    logprobs_mode,
    require_visible_segments,
    tokens_and_logprobs,
    vllm_arguments,
)
from ..engine_pod.weight_layout import Strided
from ..gang import ranks
from ..process.process_setup import set_defaults
from ..runtime.errors import EngineMissing, EngineUnprovable, TrainingError
from ..runtime.logs import vllm_logging
from ..telemetry.phases import device_bytes
from ..weights.offloaded_base import OffloadedBase
from .generation_base import EngineGeneration, EngineSetup, Sample
from .merged_weights import weight_shapes

TF32 = {"VLLM_FLOAT32_MATMUL_PRECISION": "high"}
"""Variable for training.overrides.tf32: vLLM's worker sets the precision of the whole process, and
without it takes TF32 from the trainer (v1/worker/gpu_worker.py)."""


class ColocatedGeneration(EngineGeneration):
    """The engine of this process, or of this process and its neighbours."""

    def __init__(self, setup: EngineSetup, model: nn.Module, stop_tokens: list[int]) -> None:
        """Start the engine. A collective.

        Raises:
            EngineNotStarted: vLLM raised an error.
            EngineMissing, EngineUnprovable: there is no vLLM, or what it loads can't be proven;
                BadInput where Transformers may not sample instead.
        """
        super().__init__(setup, model, stop_tokens)
        self._has_sampled = False
        if setup.engine.offload_base:
            self.offloaded_base = OffloadedBase(model)
        self._make_room()
        self._neighbours = _neighbours(setup.engine.tensor_parallel)
        self._llm = _start_engine(setup)
        # Learning overwrites the live weights, which are dummies until the first sync.
        self._sources = ranks.run_on_all(self._learn_layout)
        self._seed = 0
        self._expected_prints: dict[str, list[int]] = {}
        self._asleep = False
        self.release_memory()

    def attempt_sync(self, _version: int) -> Sequence[str]:
        """Load every weight as the policy has it now, and compare hashes on every rank."""
        self._wake()
        began, proof = time.perf_counter(), 0.0
        # Each rank asks its own worker alone, so ranks need not agree on the seed.
        self._seed = new_seed()
        self._expected_prints = expected = {}
        for name, tensor in self.weights():
            self.load_weight(name, tensor)
            loaded = time.perf_counter()
            expected[name] = expected_prints(tensor, self._sources[name], self._seed)
            proof += time.perf_counter() - loaded
            self.setup.record_event()
        sent = time.perf_counter()
        wrong = differing_names(expected, self.call_worker("weights_prints", self._seed))
        # Keys and values of earlier weights would be taken for a prompt that comes again.
        if not self._llm.reset_prefix_cache():
            raise TrainingError(
                "vLLM did not reset its prefix cache after a weight sync: requests are still "
                "running"
            )
        self.record_seconds(sent - began - proof, time.perf_counter() - sent + proof)
        return sorted({name for names in ranks.gather(wrong) for name in names})

    def changed_weights(self) -> Sequence[str]:
        """Names of the weights whose hashes differ from those of the last sync."""
        return differing_names(
            self._expected_prints, self.call_worker("weights_prints", self._seed)
        )

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """Load one weight, contiguous and in the engine's dtype, into the live model."""
        self.call_worker("weights_load", name, tensor)

    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        arguments: dict[str, Any],
        *,
        after_sampler: bool = False,
    ) -> list[Sample]:
        """Sample all prompts in one call of vLLM. Ranks that share an engine sample together, and
        each returns its own."""
        from vllm import SamplingParams

        assert self.proven_version is not None
        own_prompts = list(zip(prompts, seeds, strict=True))
        wanted, own_slice = _gather_prompts(own_prompts, self._neighbours)
        token_prompts = [{"prompt_token_ids": prompt} for prompt, _ in wanted]
        parameters = [SamplingParams(**arguments, seed=seed) for _, seed in wanted]
        if after_sampler:
            self.call_worker("logprobs_switch", AFTER_SAMPLER)
        answers = self._call(self._llm.generate, token_prompts, parameters, use_tqdm=False)
        if after_sampler:
            plan = self.setup.plan
            self.call_worker("logprobs_switch", logprobs_mode(plan.training, plan.generation))
        self._has_sampled = True
        return [
            Sample(*tokens_and_logprobs(answer.outputs[0]), self.proven_version)
            for answer in answers[own_slice]
        ]

    def release_memory(self) -> None:
        """Give the memory back, where the plan says so; the weights are lost with it, and the
        base of the policy takes its place."""
        if self.setup.engine.sleep and torch.cuda.is_available():
            # vLLM does the same, and that is no memory of the engine's.
            torch.cuda.empty_cache()
            awake_bytes = device_bytes()
            self._call(self._llm.sleep, level=2)
            self.setup.clock.leave_out(awake_bytes - device_bytes())
            # Level 2 forgets the weights, so nothing may be sampled before the next sync.
            self._asleep, self.proven_version = True, None
        if self.offloaded_base:
            self.offloaded_base.move_to_device()

    def _wake(self) -> None:
        self._make_room()
        if self._asleep:
            self._call(self._llm.wake_up)
            self.setup.clock.leave_out(0)
            self._asleep = False

    def _make_room(self) -> None:
        """Free what the engine is about to take."""
        if self.offloaded_base:
            self.offloaded_base.move_to_host()
        # The engine needs the memory that torch's allocator keeps after the trainer has freed it.
        torch.cuda.empty_cache()

    def _learn_layout(self) -> dict[str, list[Strided | None]]:
        shapes = {name: list(shape) for name, shape in weight_shapes(self.model).items()}
        dtype = self.setup.plan.execution.compute_dtype
        sources, problems = self.call_worker("weights_learn", shapes, dtype)
        if problems:
            raise unprovable_error(problems, self.setup.plan.generation)
        learnt: dict[str, list[Strided | None]] = sources
        return learnt

    def call_worker(self, method: str | Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this process's worker, by name, or a function with the worker as its
        first argument; return the answer."""
        return self._call(self._llm.collective_rpc, method, args=arguments)[0]

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of vLLM. Sleep, CUDA graphs and kernels that are compiled when they are
        first used may fail long after the constructor: until the first completions, an error is
        one of the start."""
        call = partial(method, *arguments, **options)
        return call() if self._has_sampled else start_engine(call)


def unprovable_error(problems: Sequence[str], generation: GenerationSpec) -> TrainingError:
    """The error of a run whose engine holds weights that can't be hashed."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    unprovable = EngineUnprovable(
        "spec.generation.engine: the weights of this model in an engine can't be proven "
        f"({problems[0]}{more}); set it to Transformers"
    )
    return error_for_choice(unprovable, generation)


def _start_engine(setup: EngineSetup) -> Any:
    if setup.engine.sleep:
        require_visible_segments(os.environ)
    set_defaults(os.environ, engine_environment(setup.engine))
    if setup.plan.training.overrides.tf32:
        set_defaults(os.environ, TF32)
    set_defaults(os.environ, vllm_logging(Path(tempfile.gettempdir())))
    with _same_numbers():
        return start_engine(partial(_make_llm, setup))


def _make_llm(setup: EngineSetup) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        missing = EngineMissing(f"{NO_VLLM} ({error})")
        raise error_for_choice(missing, setup.plan.generation) from error
    # The training processes are the engine's workers, so vLLM starts none of its own.
    return LLM(
        **vllm_arguments(setup.plan, setup.folder, gpu_capability()),
        distributed_executor_backend="external_launcher",
        disable_log_stats=False,  # LLM's default is to have no metrics
    )


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Random numbers go on afterwards as if nothing had been: vLLM seeds all generators of the
    process."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(list(range(torch.cuda.device_count()))):
        yield
    random.setstate(python)
    np.random.set_state(arrays)


def _neighbours(size: int) -> dist.ProcessGroup | None:
    """The ranks that share this one's engine; None where it has one of its own. A collective."""
    if size == 1:
        return None
    groups = [list(range(first, first + size)) for first in range(0, ranks.world_size(), size)]
    own_group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]
    return own_group


def _gather_prompts(
    own_prompts: list[tuple[list[int], int]], group: dist.ProcessGroup | None
) -> tuple[list[Any], slice]:
    """What all neighbours want, in their order, and which of it is this rank's. A collective of
    theirs."""
    if group is None:
        return own_prompts, slice(None)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own_prompts, group=group)
    first = sum(len(part) for part in parts[: dist.get_rank(group)])
    all_prompts = [prompt_and_seed for part in parts for prompt_and_seed in part]
    return all_prompts, slice(first, first + len(own_prompts))
