"""The reference strategies: where the frozen model comes from and where it lives, one small class
each.

TRL knows one way, which is to load the path again. Which of the five is right depends on sizes, and
the planner chooses. `strategy_for` returns the plan's strategy, for training/reference_trainer.py.
The trainer works with any strategy without knowing which. It calls them in this order:

- `build`: inside GRPOTrainer's constructor, before TRL wraps the result
- `prepare`: TRL wraps it for DeepSpeed
- `attach`: the constructor is done
- `scoring`: around every forward pass
- `move`: sync
- `save` and `restore`: checkpoints

ReferenceCallback drives the last three at TRL's public moments: after a resume, at every sync and
at the end. A strategy acts on the trainer through the narrow view PolicyTrainer, which shows how
much of TRL's trainer a reference depends on.

A sync computes reference = mixup * policy + (1 - mixup) * reference. Under ZeRO-3, TRL's
SyncRefModelCallback gathers both models whole on every rank (4 bytes per parameter of each in
bf16). Its result is lost on resume. Elementwise mixing needs no gather, since policy and reference
are partitioned alike. Each rank mixes its own partitions, in the same operations and so to the same
bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig, set_hf_deepspeed_config

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.training import ReferenceSpec, ReferenceSync

from ..runtime.errors import TrainingError
from ..weights import parameters
from ..weights.checkpoint_files import ADAPTER_CONFIG, WeightFiles, open_weights
from ..weights.model_files import Source
from ..weights.models import freeze, load_causal
from ..weights.offloaded_base import OffloadedBase
from ..weights.parameters import unwrap_model
from ..weights.policy_checks import TrainerModels, check_states
from ..weights.proof import Proof, prove_equal, prove_weights
from . import reference_state


class PolicyTrainer(TrainerModels, Protocol):
    """The trainer of the policy, as its reference needs it."""

    accelerator: Any
    """accelerate's Accelerator."""
    args: Any
    """TRL's GRPOConfig."""
    source: Source
    """The files that the policy was loaded from."""
    proofs: list[Proof]
    """Every proof made so far, in order."""
    resumed_from: Path | None
    """The checkpoint that the run continues from."""
    configuration: str
    """Fingerprint of what lies beside the weights in the model's folder."""

    @property
    def start(self) -> str:
        """Fingerprint of the weights that the run began with, adapter included."""


@torch.no_grad()
def mix_weights(policy: nn.Module, reference: nn.Module, mixup: float) -> None:
    """Mixes every parameter once, a tied one too, on this rank's elements. No collective."""
    targets = parameters.parameters_by_name(reference)
    sources = parameters.parameters_by_name(policy)
    assert targets.keys() == sources.keys()  # both were loaded from the same files
    for name, target in targets.items():
        with parameters.local_share(target) as old, parameters.local_share(sources[name]) as new:
            assert (old.start, old.stop, old.shape) == (new.start, new.stop, new.shape), name
            old.tensor.mul_(1.0 - mixup).add_(new.tensor.to(old.tensor.device), alpha=mixup)
        parameters.release(target)


class ReferenceStrategy:
    """Where the reference comes from, where it lives, how it moves and how it is saved.

    Which one fits a ZeRO stage, an adapter and beta, the planner knows (its search/methods.py).
    """

    name: ClassVar[str]
    """Name in the plan."""

    def __init__(self, sync: ReferenceSync | None = None) -> None:
        self.sync = sync

    def build(self, trainer: PolicyTrainer) -> nn.Module:  # noqa: ARG002
        """The frozen reference, not yet wrapped. `trainer.model` is the policy as loaded. TRL asks
        for none with beta 0, and none with an adapter."""
        raise TrainingError(f"TRL asked for a reference model, and strategy {self.name} has none")

    def prepare(
        self, model: nn.Module, trainer: PolicyTrainer, wrap: Callable[..., Any]
    ) -> nn.Module:
        """Wraps a model for DeepSpeed inference by `wrap(model, accelerator)`."""
        wrapped: nn.Module = wrap(model, trainer.accelerator)
        return wrapped

    def attach(self, trainer: PolicyTrainer) -> None:
        """Called once the trainer is built; most strategies need nothing more."""

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surrounds a forward pass for log-probabilities with `model`, which may be the policy."""
        return nullcontext()

    def move(self, trainer: PolicyTrainer) -> None:
        """Moves the reference towards the policy by `sync.mixup`. A collective under ZeRO-3 only
        for its next pass."""
        if self.sync and trainer.ref_model is not None:
            mix_weights(trainer.model, unwrap_model(trainer.ref_model), self.sync.mixup)

    def save(self, trainer: PolicyTrainer, folder: Path) -> None:
        """Writes into a checkpoint which weights the reference began with and, if it moves, where
        it is now."""
        reference_state.save_identity(folder, trainer.start, trainer.configuration)
        if self.sync and trainer.ref_model is not None:
            reference_state.save_reference(unwrap_model(trainer.ref_model), folder)

    def restore(self, trainer: PolicyTrainer, folder: Path) -> None:
        """Checks that the reference began as the checkpoint's, and reads where it has moved since.
        A collective.

        Raises:
            BadInput: the model's files have changed since.
            WeightsDiffer: what was read is not what was saved.
        """
        reference_state.check_identity(folder, trainer.start, trainer.configuration)
        if self.sync and trainer.ref_model is not None:
            reference_state.restore_reference(unwrap_model(trainer.ref_model), folder)


class Sharded(ReferenceStrategy):
    """A second, frozen model partitioned like the policy."""

    name: ClassVar[str] = "Sharded"

    def __init__(
        self, sync: ReferenceSync | None = None, offload: bool = False, remote_code: bool = False
    ) -> None:
        super().__init__(sync)
        self.offload = offload
        self.remote_code = remote_code

    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """Loads the policy's files again, partitioned as they are read."""
        with self._config(trainer):
            reference: nn.Module = load_causal(trainer.source, self.remote_code)
        return freeze(reference)

    def prepare(
        self, model: nn.Module, trainer: PolicyTrainer, wrap: Callable[..., Any]
    ) -> nn.Module:
        """Wraps with the reference's own offload settings instead of the policy's."""
        if model is not trainer.ref_model:
            return super().prepare(model, trainer, wrap)
        plugin = trainer.accelerator.state.deepspeed_plugin
        policy_config = plugin.deepspeed_config
        plugin.deepspeed_config = self.config(policy_config)
        try:
            return super().prepare(model, trainer, wrap)
        finally:
            plugin.deepspeed_config = policy_config

    def config(self, policy: dict[str, Any]) -> dict[str, Any]:
        """The policy's DeepSpeed config with the place of the reference's partitions instead of the
        policy's."""
        config = copy.deepcopy(policy)
        zero = config["zero_optimization"]
        zero.pop("offload_param", None)
        if self.offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        return config

    @contextmanager
    def _config(self, trainer: PolicyTrainer) -> Iterator[None]:
        """transformers' global DeepSpeed config is the reference's inside, the policy's
        afterwards."""
        policy = trainer.args.hf_deepspeed_config
        # Kept by name: transformers has but a weak reference.
        reference = HfDeepSpeedConfig(self.config(policy.config))
        try:
            yield
        finally:
            set_hf_deepspeed_config(policy)
            del reference


class Clone(ReferenceStrategy):
    """A frozen copy in eval mode beside the policy."""

    name: ClassVar[str] = "Clone"

    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """Copies the policy. Before TRL adds its fused head: a copy of that would still call the
        policy."""
        policy: nn.Module = trainer.model
        return freeze(copy.deepcopy(policy))


class NoReference(ReferenceStrategy):
    """Trains without a KL term."""

    name: ClassVar[str] = "None"


class Adapter(ReferenceStrategy):
    """The base model itself; no copy."""

    name: ClassVar[str] = "Adapter"

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Eval mode for passes with the adapter off; nothing for the policy's own."""
        return evaluating(model) if is_adapter_disabled(model) else nullcontext()


def is_adapter_disabled(model: nn.Module) -> bool:
    """Whether PEFT's adapter layers in the model are disabled now."""
    return any(
        layer.disable_adapters for layer in model.modules() if isinstance(layer, BaseTunerLayer)
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards, also after an exception, every module's own mode again.
    Nests."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Offload(ReferenceStrategy):
    """A copy in pinned host memory."""

    name: ClassVar[str] = "Offload"

    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """Copies the policy's parameters to the host, without a second copy on the GPU on the
        way."""
        policy: nn.Module = trainer.model
        host = {
            p: nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=False)
            for p in policy.parameters()
        }
        return freeze(copy.deepcopy(policy, {id(p): copied for p, copied in host.items()}))

    def attach(self, trainer: PolicyTrainer) -> None:
        """Takes the parameters back to the host: TRL's wrapping put them on the device (before any
        optimizer state). On a GPU they are page-locked, so that copies to it can overlap."""
        OffloadedBase(unwrap_model(trainer.ref_model)).move_to_host()

    def scoring(self, trainer: PolicyTrainer, model: nn.Module) -> AbstractContextManager[None]:
        """Brings the copy in for its own passes."""
        if model is not trainer.ref_model:
            return nullcontext()
        return on_device(model, trainer.accelerator.device)


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters on `device` inside; afterwards, also after an exception, the same host memory as
    before."""
    home = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, data in home:
            parameter.data = data.to(device, non_blocking=True)
        yield
    finally:
        for parameter, data in home:
            parameter.data = data


class ReferenceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Proves, restores and moves at the right moments."""

    def __init__(self, trainer: PolicyTrainer, strategy: ReferenceStrategy) -> None:
        self.trainer = trainer
        self.strategy = strategy

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The checkpoint is loaded and the models are wrapped: prove it, restore the reference,
        check states."""
        folder = self.trainer.resumed_from
        if folder:
            with resumed_weights(folder, self.trainer.source.folder) as files:
                self.trainer.proofs.append(
                    prove_weights(self.trainer.model, files, "resumed policy")
                )
            self.strategy.restore(self.trainer, folder)
        check_states(self.trainer)

    def on_step_end(self, _: TrainingArguments, state: TrainerState, *__: Any, **___: Any) -> None:
        """Moves the reference every `sync.everySteps` steps."""
        sync = self.strategy.sync
        if sync and state.global_step % sync.every_steps == 0:
            self.strategy.move(self.trainer)
            check_states(self.trainer)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """What is exported is the same on all ranks; the engine has asked the same before every
        checkpoint."""
        prove_equal(self.trainer.model, "policy")


def resumed_weights(checkpoint: Path, base: Path) -> WeightFiles:
    """What the policy must hold after a resume: the checkpoint's weights, under an adapter the
    base's as before."""
    weights = open_weights(checkpoint)
    if (checkpoint / ADAPTER_CONFIG).exists():
        weights.paths.update(open_weights(base).paths)
    return weights


def strategy_for(
    execution: ExecutionPlan, reference: ReferenceSpec, *, trust_remote_code: bool
) -> ReferenceStrategy:
    """The strategy that the plan chose, with its sync and offload settings.

    Under ZeRO-3 an offloaded reference is a sharded one whose partitions are in host memory:
    DeepSpeed streams them in, and no rank ever holds a whole copy.
    """
    sync, strategy = reference.sync, execution.strategy
    if strategy == "Sharded" or (strategy == "Offload" and execution.zero_stage == 3):
        offload = strategy == "Offload" or reference.offload is not None
        return Sharded(sync, offload, trust_remote_code)
    plain = {kind.name: kind for kind in (Clone, Adapter, Offload, NoReference)}
    return plain[strategy](sync)
