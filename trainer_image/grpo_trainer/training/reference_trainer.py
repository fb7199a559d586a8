"""TRL's GRPOTrainer with a reference of our choice, proven weights, exact references, no poisoned
checkpoint.

TRL 1.16 has no hook for any of these, so this file and finite_loss.py use TRL's private names, and
no other does. There are seventeen, TRL is pinned, and tests/trainer/test_engine_contract.py fails
when one of them changes:

- `grpo_trainer.create_model_from_path` and `grpo_trainer.prepare_deepspeed` load and wrap TRL's own
  reference. Ours is put in their place while the constructor runs. So is our engine in that of
  `grpo_trainer.VLLMGeneration`;
- `_get_per_token_logps_and_entropies` is every forward pass for log-probabilities, the reference's
  too;
- `_compute_loss` is where a KL overflows, and `_metrics` where it is seen before the optimizer acts
  on it. `_last_world_entropy` and `_entropy_window_stats` are what such a pass changes besides;
- `_get_grad_norm` is transformers', the last moment before the optimizer acts on a gradient that
  may not be finite (this and the line above: finite_loss.py);
- `_save_checkpoint` is the moment at which ranks must agree and a moved reference must be saved
  (what it calls is in checkpoints/writing.py);
- `_generate_single_turn` is the generation that is cut into sub-batches, and timed;
- `_calculate_rewards` is what is timed as rewards; `_logs` has the last generation of all ranks,
  of which samples are kept;
- `_get_train_sampler` makes the order of the prompts, `_run_epoch` is one pass over them, and
  `_step` counts micro-batches. `_buffered_inputs` is the generation that they are cut from. TRL's
  checkpoints know neither place.

    trainer = ReferenceGRPOTrainer(loaded=loaded, strategy=strategy_for(...), args=config,
    reward_funcs=...,
                                   train_dataset=..., callbacks=...)
    trainer.train(resume_from_checkpoint=folder_or_none)

It proves policy and reference while it is built (trainer.proofs). After a resume it proves again
and restores the reference. It checks states, syncs, and saves a moved reference into every
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteriaList
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from grpo_api.findings.step_row import RANK_SECONDS
from grpo_api.report.revisions import Generations
from grpo_api.report.training_metrics import ENGINE_MISMATCH, ENGINE_MISMATCH_MAX

from ..checkpoints import writing
from ..checkpoints.writing import replace_attribute
from ..data.dataset import restore_columns
from ..data.order import PromptOrder
from ..gang import ranks
from ..generation import canary
from ..generation.generation_base import EngineGeneration, Sample
from ..generation.stop_strings import StopStrings, mark_stopped
from ..history.run_history import CompletionFacts, Generation
from ..reference import reference_state
from ..reference.strategies import ReferenceCallback, ReferenceStrategy, evaluating
from ..runtime.errors import Diverged
from ..runtime.paths import checkpoint_folder
from ..telemetry.observer import StepObserver
from ..weights import policy_checks
from ..weights.checkpoint_files import open_weights
from ..weights.exported_adapter import load_adapter
from ..weights.model_files import Source
from ..weights.models import LoadedModel
from ..weights.proof import Proof, prove_equal, prove_weights
from .finite_loss import FiniteLossTrainer
from .guard import EngineGuard, largest_mean_difference

MakeEngine = Callable[[nn.Module, list[int]], EngineGeneration]
"""Makes what samples completions in the policy's place, of the policy and the tokens that end a
completion."""
Save = Callable[[int, Callable[[], None]], None]
"""Makes the checkpoint of a step of what a collective writes."""


class ReferenceGRPOTrainer(FiniteLossTrainer):
    """GRPOTrainer whose reference is a ReferenceStrategy."""

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        strategy: ReferenceStrategy,
        args: GRPOConfig,
        observer: StepObserver | None = None,
        save: Save = lambda _, write: write(),
        save_samples: Callable[[Path], None] | None = None,
        generation_sub_batch: int = 0,
        make_engine: MakeEngine | None = None,
        skipped: Sequence[Generations] = (),
        stop: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.source: Source = loaded.source
        self.configuration = reference_state.shared_configuration(self.source.folder)
        self.strategy = strategy
        self.observer = observer or StepObserver()
        self.save = save
        self.save_samples = save_samples  # into a checkpoint; None without samples to keep
        self._facts: list[CompletionFacts] = []
        self.observer.take_generation = self._take_generation
        self.generation_sub_batch = generation_sub_batch
        self.skipped = skipped  # of the order of the data
        self.stop = stop  # texts that end a completion
        self.proofs: list[Proof] = []
        """Every proof made so far, in order; telemetry reads their times."""
        self.resumed_from: Path | None = None
        self.engine_guard: EngineGuard | None = None
        """Judges each generation of an engine before the policy is trained on it; None where TRL
        compares no log-probabilities."""
        self.canary_guard: EngineGuard | None = None
        """Judges the engine's canaries."""
        adapter = loaded.peft_config is not None
        if not adapter:
            self.prove("policy", loaded.model)
        # Before the constructor: what it wraps for several ranks, it also overwrites with rank 0's
        # weights.
        with _own_parts(self, make_engine):
            super().__init__(
                model=loaded.model,
                processing_class=loaded.tokenizer,
                peft_config=loaded.peft_config,
                args=args,
                **kwargs,
            )
        if self.ref_model is not None:
            strategy.attach(self)
        if adapter:  # TRL has created it; nothing is wrapped for several ranks before train()
            self.prove("policy", self.model)
        # after the proof whose fingerprint names the start: a resume finds a fresh adapter there
        if loaded.adapter:
            self._load_exported_adapter(loaded.adapter)
        self.add_callback(ReferenceCallback(self, strategy))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Trains; `resume_from_checkpoint` is the folder of a complete checkpoint.

        Raises:
            WeightsDiffer: after a resume the weights are not the checkpoint's.
            BadInput: the checkpoint has no reference, or another.
        """
        self.resumed_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def prove(self, what: str, model: nn.Module) -> None:
        """Proves a model against the files that the policy was loaded from. A collective.

        Raises:
            WeightsDiffer: on any rank.
        """
        with open_weights(self.source.folder) as files:
            self.proofs.append(prove_weights(model, files, what))

    def _load_exported_adapter(self, adapter: Path) -> None:
        """Loads an exported adapter and proves it. Only the policy has it: the reference stays the
        bare base."""
        load_adapter(self.model, adapter, self.source)
        with open_weights(adapter) as files:
            self.proofs.append(prove_weights(self.model, files, "adapter", adapter_only=True))

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._order = PromptOrder(super()._get_train_sampler(*args, **kwargs), self.skipped)
        return self._order

    def _run_epoch(self, *, epoch: int, steps_in_epoch: int, **kwargs: Any) -> None:
        """One pass over the prompts, from its place in their order and in a generation; none after
        the last step.

        transformers skips what a resumed run has had of this pass, but it knows nothing of the
        passes before, nor of a generation that is half used; and it would take one step more than
        all.
        """
        if self.state.global_step >= self.state.max_steps:
            return
        begun = kwargs["steps_trained_in_current_epoch"] if epoch == kwargs["epochs_trained"] else 0
        self._step = epoch * steps_in_epoch + begun
        self._order.epoch = epoch
        if self.resumed_from and self._within_generation():
            parts = self.args.steps_per_generation
            self._buffered_inputs = writing.load_rollouts(
                self.resumed_from, self.accelerator.device, parts
            )
        super()._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **kwargs)

    def _generation(self) -> int:
        """Number of the generation that the current micro-batch is a part of, from 0 over the whole
        run."""
        return int(self._step // (self.args.steps_per_generation * self.num_iterations))

    def _within_generation(self) -> bool:
        """True if micro-batches are left of the last generation."""
        return bool(self._step % (self.args.steps_per_generation * self.num_iterations))

    @property
    def engine(self) -> EngineGeneration | None:
        """The engine that samples completions instead of the policy."""
        return self.vllm_generation if self.use_vllm else None

    @property
    def start(self) -> str:
        """Fingerprint of the weights before a step, with a fresh adapter: the same in every
        attempt."""
        return self.proofs[0].fingerprint

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one micro-batch: the loss, then the backward pass. Return the loss, a scalar without
        gradient."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.observer.clock.enter(None)
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        # Before the backward pass: within it DeepSpeed makes its optimizer step.
        if self.engine and self.engine_guard and self.model.training:
            step = self.state.global_step + 1
            metrics, read_largest = self._metrics["train"], self._largest_mean_difference
            self.engine_guard.judge(self._generation(), step, metrics, read_largest)
        return super()._compute_loss(model, inputs)

    def _largest_mean_difference(self) -> float:
        return max(ranks.gather(largest_mean_difference(self._buffered_inputs)))

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """TRL's generation, at most `generation_sub_batch` completions of this process at a time
        (0: all at once).

        Only for text: the further arguments, which TRL fills for images, are the same for every
        part.
        """
        size = self.generation_sub_batch or len(prompt_ids)
        first = self.accelerator.process_index * len(prompt_ids)
        completions: list[list[int]] = []
        logprobs: list[list[float]] = []
        versions: list[int] = []
        self.require_finite()  # a rank that samples from NaN raises an error of its own
        generation = self._generation()
        with self.observer.clock.phase("generate"):
            for start in range(0, len(prompt_ids), size):
                if self.engine:
                    self.engine.set_position(generation, first + start)
                part = prompt_ids[start : start + size]
                completion_ids, scored = self._generate_part(part, *args, **kwargs)
                completions += completion_ids
                logprobs += scored or []
                versions += self.engine.versions if self.engine else []
            self.observer.weights_versions = versions
            if self.engine:
                continued: list[tuple[list[int], Sample]] = []
                plan = self.engine.setup.plan
                if canary.is_due(plan.training, plan.generation, generation):
                    continued = self.engine.sample_canary(prompt_ids)
                # The policy may have no room, or no base, beside an engine that is awake.
                self.engine.release_memory()
                self._compare_canary(continued)
        return completions, logprobs or None

    def _generate_part(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """TRL's generation, where completions end at stop strings, too. An engine ends them
        itself."""
        if not self.stop:
            return super()._generate_single_turn(prompts, *args, **kwargs)
        tokenizer, end_tokens = self.processing_class, self.eos_token_ids
        if self.engine:
            completion_ids, scored = super()._generate_single_turn(prompts, *args, **kwargs)
        else:
            criterion = StopStrings(self.stop, tokenizer, end_tokens, prompts)
            policy = self.accelerator.unwrap_model(self.model_wrapped)
            # TRL passes generate no criterion.
            criteria = StoppingCriteriaList([criterion])
            generate = partial(policy.generate, stopping_criteria=criteria)
            with replace_attribute(policy, "generate", generate):
                completion_ids, scored = super()._generate_single_turn(prompts, *args, **kwargs)
            completion_ids = criterion.remove_padding(completion_ids)
        return mark_stopped(completion_ids, self.stop, tokenizer, end_tokens[0]), scored

    def _compare_canary(self, continued: list[tuple[list[int], Sample]]) -> None:
        """Judge how far the engine's log-probabilities of these tokens are from the policy's. A
        collective.

        Where TRL compares no completions, this is logged under the names of its comparison. Without
        canaries nothing is.

        Raises:
            EngineMismatch: they are too far apart.
        """
        if not continued:
            return
        device = self.accelerator.device
        differences = []
        for prompt, sample in continued:
            tokens = torch.tensor([prompt + sample.tokens], device=device)
            with torch.no_grad():
                scores, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, tokens, torch.ones_like(tokens), len(sample.tokens)
                )
            differences.append((scores[0] - torch.tensor(sample.logprobs, device=device)).abs())
        difference = torch.cat(differences)
        means = self.accelerator.gather(difference.mean())
        largest = self.accelerator.gather(difference.max())
        mean = means.mean().item()
        if self.engine_guard is None:
            metrics = self._metrics["train"]
            metrics[ENGINE_MISMATCH.trl].append(mean)
            metrics[ENGINE_MISMATCH_MAX.trl].append(largest.max().item())
        if self.canary_guard is not None:
            step = self.state.global_step + 1
            self.canary_guard.judge(self._generation(), step, {ENGINE_MISMATCH.trl: [mean]})

    def _calculate_rewards(
        self, inputs: Any, prompts: list[Any], completions: list[Any], tokens: list[list[int]]
    ) -> torch.Tensor:
        # A reward function gets the tokens as they are: StoppedCompletion is for TRL alone.
        plain_tokens = [list(ids) for ids in tokens]
        with self.observer.clock.phase("reward"):
            rewards: torch.Tensor = super()._calculate_rewards(
                [*map(restore_columns, inputs)], prompts, completions, plain_tokens
            )
        self.observer.num_scored += len(completions)
        if self.observer.counters:
            weights = self.reward_weights.tolist()
            group_size, names = self.num_generations, self.reward_func_names
            self.observer.counters.add_rewards(rewards.tolist(), names, weights, group_size)
        if self.save_samples:
            self._facts = [
                fact for facts in ranks.gather(self._own_facts(tokens)) for fact in facts
            ]
        return rewards

    def _own_facts(self, tokens: list[list[int]]) -> list[CompletionFacts]:
        """What TRL does not keep of this rank's completions."""
        ends = {*self.eos_token_ids, self.processing_class.pad_token_id}
        versions: Sequence[int | None] = self.observer.weights_versions or [None] * len(tokens)
        return [
            CompletionFacts(len(ids), ids[-1] not in ends, version)
            for ids, version in zip(tokens, versions, strict=True)
        ]

    def _take_generation(self) -> Generation | None:
        """The completions of all ranks that were generated since the last call; None for none."""
        facts, self._facts = self._facts, []
        if not facts:
            return None
        logs = self._logs
        return Generation(
            list(logs["prompt"]),
            list(logs["completion"]),
            {name: list(scores) for name, scores in logs["rewards"].items()},
            list(logs["advantages"]),
            facts,
            self.num_generations,
        )

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        phase = "forward" if torch.is_grad_enabled() else "reference"
        measured = self.observer.compute.measure_pass(model, input_ids.numel())
        # What is compared with an engine's numbers: it samples without the adapter's dropout.
        is_compared = self.engine is not None and phase == "reference"
        mode = evaluating(model) if is_compared else nullcontext()
        with self.strategy.scoring(self, model), mode, self.observer.clock.phase(phase), measured:
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """TRL's log, of a measured step with the ranks' own seconds: so the history and the
        checkpoint's state have them."""
        if self.observer.rank_seconds and "loss" in logs:
            logs[RANK_SECONDS] = self.observer.rank_seconds
        super().log(logs, *args, **kwargs)

    def require_finite(self, optimizer: Any = None) -> None:
        """Makes sure that the policy, and the optimizer where one is given, hold finite numbers
        only. A collective.

        Raises:
            Diverged: on any rank.
            DriftedApart: of weights that all ranks hold whole, only some are not finite.
        """
        try:
            policy_checks.require_finite_policy(self.model, optimizer, self.state.global_step)
        except Diverged:
            prove_equal(self.model, "policy")
            raise

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save(self.state.global_step, lambda: self._write_checkpoint(model, trial))

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes what is ours first: once TRL's part is written, the checkpoint looks complete.

        Raises:
            DriftedApart: the ranks hold different weights; such a checkpoint is worth nothing and
                isn't written.
            Diverged: the weights or the optimizer's state are not finite; the same.
            DiskFailed: a write of this rank failed; it has gone along with the others to the end.
        """
        prove_equal(self.model, "policy")
        self.require_finite(self.optimizer)
        folder = checkpoint_folder(Path(self.args.output_dir), self.state.global_step)
        with self.written_whole():
            self.write(self.strategy.save, self, folder)
            if self.save_samples:
                self.write(self.save_samples, folder)
            if self._within_generation():
                self.write(writing.save_rollouts, folder, self._buffered_inputs)
            super()._save_checkpoint(model, trial)


@contextmanager
def _own_parts(trainer: ReferenceGRPOTrainer, make_engine: MakeEngine | None) -> Iterator[None]:
    """While TRL's constructor runs, what it calls to load and wrap a reference is the strategy, and
    its engine is ours.

    The policy is an instance, so that the loader is called for the reference alone.
    """
    wrap = grpo_trainer.prepare_deepspeed  # TRL's own, with which a strategy may wrap

    def build(*_: Any, **__: Any) -> nn.Module:
        reference = trainer.strategy.build(trainer)
        trainer.prove("reference", reference)
        return reference

    def prepare(model: nn.Module, _: Any) -> nn.Module:
        return trainer.strategy.prepare(model, trainer, wrap)

    def engine(*_: Any, **__: Any) -> EngineGeneration:
        assert make_engine is not None
        return make_engine(trainer.model, trainer.eos_token_ids)

    loader = replace_attribute(grpo_trainer, "create_model_from_path", build)
    client = replace_attribute(grpo_trainer, "VLLMGeneration", engine)
    with loader, client, replace_attribute(grpo_trainer, "prepare_deepspeed", prepare):
        yield
