"""What TRL gets in place of its own vLLM client: an engine whose weights are numbered, and proven
before they are used.

A sync brings the policy's weights into the engine under a new number. That number is never used
again, neither in this attempt nor in a later one. Then the engine hashes what it computes with,
where it lies, and the trainer what it meant to send. Unless all hashes are the same, no completion
is sampled. Unless the engine finds the same once more after it has sampled, none is used.

TRL calls `sync_weights` once the policy has changed and `generate` for completions (TRL 1.16,
trl/generation/vllm_generation.py); the rest of this interface is ours.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.training_metrics import (
    ENGINE_PROOF_FAILURES,
    WEIGHT_PROOF_SECONDS,
    WEIGHT_SYNC_SECONDS,
    WEIGHTS_VERSION,
)
from grpo_api.spec.generation import EnginePlan

from ..engine_pod.vllm_arguments import completion_seed, sampling_arguments
from ..gang import ranks
from ..runtime.errors import EngineMismatch, EngineWeightsDiffer
from ..telemetry.phases import PhaseClock
from ..weights.offloaded_base import OffloadedBase
from ..weights.parameters import TRAINED_ADAPTER
from . import canary
from .merged_weights import has_changed_weight, policy_weights, require_pefts_merge

ATTEMPT_VERSIONS = 10**9
"""Numbers for one attempt's weights; those of the next attempt follow."""
MERGE_CHECK_ELEMENTS = 1 << 28
"""Largest weight whose merge is compared with PEFT's: a copy in float32 takes 1 GiB of host
memory."""
TRIES = 2
"""How often the same weights are sent before an engine that can't be proven is given up."""

Metrics = Callable[[dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    tokens: list[int]
    """Its tokens, with the one that ended it."""
    logprobs: list[float]
    """The engine's log-probability of each."""
    version: int
    """Number of the weights that it was sampled with."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Everything that an engine is built from."""

    plan: TrainingPlan
    folder: Path
    """The model's configuration; weights in it aren't read."""
    clock: PhaseClock
    record_metrics: Metrics
    """Takes what telemetry publishes, by key."""
    record_event: Callable[[], None]
    """Called at every sign of progress."""
    record_wait: Callable[[str], None] = lambda _: None
    """Called with the reason why there is no engine to go on with; with an empty one once there
    is."""

    @property
    def engine(self) -> EnginePlan:
        """The plan's engine."""
        assert self.plan.execution.engine is not None
        return self.plan.execution.engine


class EngineGeneration(ABC):
    """The interface that TRL calls, over what kinds of engines differ in."""

    def __init__(self, setup: EngineSetup, model: nn.Module, stop_tokens: list[int]) -> None:
        """`model` is the policy before it is wrapped for several ranks; `stop_tokens` end a
        completion."""
        self.setup = setup
        self.model = model
        self.stop_tokens = stop_tokens
        self.proven_version: int | None = None
        """Number of the weights that the engine was proven to have; None while it has none."""
        self.versions: list[int] = []
        """Numbers of the weights that the last completions were sampled with, one for each."""
        # A number is never used twice in a job, so that no earlier answer can pass for a later one.
        self._last = setup.plan.job.attempt * ATTEMPT_VERSIONS
        self._generation = self._place = 0
        self.failures = 0
        """Syncs and generations after which the engine did not have the weights."""
        self.sync_seconds = self.proof_seconds = 0.0
        """What the last sync took, and its proof."""
        self._is_merge_checked = not isinstance(model, PeftModel)
        self.offloaded_base: OffloadedBase | None = None
        """The policy's frozen base, where it is in host memory while the engine is awake."""

    def set_position(self, generation: int, place: int) -> None:
        """Set which completions are sampled next: those of this generation, from this place among
        all ranks' on."""
        self._generation, self._place = generation, place

    def sync_weights(self) -> None:
        """Bring the policy's weights into the engine and prove that they are there. A collective.

        Raises:
            EngineWeightsDiffer: it has others, time and again.
            BadInput: this model's weights in an engine can't be proven.
        """
        with self.setup.clock.phase("sync"):
            # A skipped tensor or a flipped bit is repaired by sending the weights once more, under
            # a new number.
            wrong: Sequence[str] = ()
            for _ in range(TRIES):
                self.proven_version = None
                self._last += 1
                wrong = self.attempt_sync(self._last)
                if not wrong:
                    self.proven_version = self._last
                    break
                self.failures += 1
            self._record_metrics()
        if self.proven_version is None:
            raise EngineWeightsDiffer(
                f"after {TRIES} syncs the engine's weights are not the trainer's: "
                f"{_shortened_list(wrong)}. No completion was sampled with them; where it happens "
                "again, set spec.generation.engine to Transformers"
            )

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,  # noqa: ARG002 - TRL's
        profiler: Any = None,  # noqa: ARG002 - TRL's
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """One completion for each prompt (token ids); TRL repeats a prompt for each completion of
        its group.

        Returns:
            The prompts, the completions' tokens, per token a list with its log-probability, and
            None.
        """
        assert images is None
        plan = self.setup.plan
        places = range(self._place, self._place + len(prompts))
        seed, number = plan.training.seed, self._generation
        seeds = [completion_seed(seed, number, place) for place in places]
        arguments = sampling_arguments(plan.training, plan.generation, self.stop_tokens)
        for _ in range(TRIES):
            if self.proven_version is None:
                self.sync_weights()
            samples = self.sample(prompts, seeds, arguments)
            has_changed = bool(self.changed_weights())
            is_other = any(sample.version != self.proven_version for sample in samples)
            # All ranks agree, since the sync that would follow is a collective.
            if not ranks.any_rank(has_changed or is_other):
                break
            self.failures += 1
            self.proven_version = None
        self._require_numbers(samples)
        self._require_ends(samples, arguments)
        self._record_metrics()
        if self.proven_version is None:
            raise EngineWeightsDiffer(
                f"{TRIES} times the engine's weights were no longer those that it was proven to "
                "have when it had sampled; no completion of it was used"
            )
        tokens = [sample.tokens for sample in samples]
        # TRL expects a list of alternatives per token. The engine gives only the token that it
        # sampled.
        logprobs = [[[logprob] for logprob in sample.logprobs] for sample in samples]
        self.versions = [sample.version for sample in samples]
        return prompts, tokens, logprobs, None

    def _require_numbers(self, samples: Sequence[Sample]) -> None:
        """TRL leaves out of its comparison what is not a number (trl/trainer/grpo_trainer.py), so
        that an engine of which nothing is one would pass. A collective: where one rank ends alone,
        the others report a lost peer.

        Raises:
            EngineMismatch: a log-probability of any rank is not finite.
        """
        wrong = sum(not math.isfinite(logprob) for sample in samples for logprob in sample.logprobs)
        wrong_of_all = sum(ranks.gather(wrong))
        if wrong_of_all:
            raise EngineMismatch(
                f"{wrong_of_all} of the engine's log-probabilities of generation "
                f"{self._generation} are not finite numbers: set generation.engine to Transformers"
            )

    def _require_ends(self, samples: Sequence[Sample], arguments: dict[str, Any]) -> None:
        """Log-probabilities are right in an engine, too, that does not end completions as it is
        asked to. A collective, as _require_numbers.

        Raises:
            EngineMismatch: a completion of any rank goes on after a token that ends it, or is
                longer than allowed.
        """
        stops, most = frozenset(self.stop_tokens), arguments["max_tokens"]
        wrong = sum(
            len(sample.tokens) > most or not stops.isdisjoint(sample.tokens[:-1])
            for sample in samples
        )
        wrong_of_all = sum(ranks.gather(wrong))
        if wrong_of_all:
            raise EngineMismatch(
                f"{wrong_of_all} completions of generation {self._generation} go on after a token "
                f"that ends them, or have more than {most} tokens (training.maxCompletionLength): "
                "set generation.engine to Transformers"
            )

    @abstractmethod
    def attempt_sync(self, version: int) -> Sequence[str]:
        """Send the weights once under this number; names of the weights that differ afterwards. A
        collective."""

    def sample_canary(self, prompts: list[list[int]]) -> list[tuple[list[int], Sample]]:
        """Continue a few of this rank's prompts by tokens whose log-probabilities can be compared
        with the trainer's; return each prompt with its continuation. A collective."""
        training, rank = self.setup.plan.training, ranks.rank()
        count = canary.count_per_rank(self.setup.engine.replicas, ranks.world_size())
        canary_prompts = canary.prompts_for(prompts, count)
        seeds = canary.seeds_for(training, self._generation, rank, count)
        arguments = canary.arguments_for(training, self.setup.plan.generation)
        samples = self.sample(canary_prompts, seeds, arguments, after_sampler=True)
        return list(zip(canary_prompts, samples, strict=True))

    @abstractmethod
    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        arguments: dict[str, Any],
        *,
        after_sampler: bool = False,
    ) -> list[Sample]:
        """One completion for each prompt with its seed, under the proven weights, in the prompts'
        order; `arguments` are those of vllm.SamplingParams. `after_sampler`: log-probabilities are
        taken after the sampler, whatever those of completions are."""

    @abstractmethod
    def changed_weights(self) -> Sequence[str]:
        """Names of weights that are no longer what they were proven to be, as far as this rank has
        a part of them."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights in the engine's type, one at a time; see policy_weights."""
        dtype = getattr(torch, self.setup.plan.execution.compute_dtype)
        check_merge = None if self._is_merge_checked else self._check_merge
        device = self.offloaded_base.device if self.offloaded_base else None
        return policy_weights(self.model, dtype, check_merge, device)

    def _check_merge(
        self, name: str, layer: LoraLayer, weight: torch.Tensor, merged: torch.Tensor
    ) -> None:
        """Compare the first weight that the adapter changes with PEFT's own merge, once.

        Raises:
            EngineWeightsDiffer: they differ.
        """
        # The embedding alone may have a thousand times a projection's elements.
        if self._is_merge_checked or weight.numel() > MERGE_CHECK_ELEMENTS:
            return
        if not has_changed_weight(layer):
            return
        assert isinstance(self.model, PeftModel)
        config = self.model.peft_config[TRAINED_ADAPTER]
        require_pefts_merge(name, layer, config, weight, merged)
        self._is_merge_checked = True

    def release_memory(self) -> None:  # noqa: B027 - most engines have nothing to do then
        """Called once a generation's completions are all there, before the policy is trained on
        them."""

    def record_seconds(self, sync: float, proof: float) -> None:
        """Publish what a sync and its proof took, in seconds."""
        self.sync_seconds, self.proof_seconds = sync, proof
        self.setup.record_metrics({WEIGHT_SYNC_SECONDS.key: sync, WEIGHT_PROOF_SECONDS.key: proof})

    def _record_metrics(self) -> None:
        metrics = {ENGINE_PROOF_FAILURES.key: float(self.failures)}
        if self.proven_version is not None:
            metrics[WEIGHTS_VERSION.key] = float(self.proven_version)
        self.setup.record_metrics(metrics)


def _shortened_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
