"""The reference strategies: where the frozen model comes from and where it lives, one small class
each.

TRL knows one way, which is to load the path again. Which of the five is right depends on sizes, and
the planner chooses. `strategy_for` returns the plan's strategy, for training/reference_trainer.py.
ReferenceCallback drives it at TRL's public moments: after a resume, at every sync and at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig, set_hf_deepspeed_config

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.training import ReferenceSpec, ReferenceSync

from ..runtime.errors import BadInput
from ..weights.checkpoint_files import ADAPTER_CONFIG, WeightFiles, open_weights
from ..weights.models import freeze, load_causal
from ..weights.parameters import unwrap_model
from ..weights.policy_checks import check_states
from ..weights.proof import prove_equal, prove_weights
from .strategy_base import PolicyTrainer, ReferenceStrategy


class Sharded(ReferenceStrategy):
    """A second, frozen model partitioned like the policy."""

    name: ClassVar[str] = "Sharded"
    zero_stages: ClassVar[tuple[int, ...]] = (3,)

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
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    has_own_model: ClassVar[bool] = False

    def check(self, zero_stage: int, adapter: bool, beta: float) -> None:  # noqa: ARG002  # fits all stages and methods
        """Require beta 0."""
        super().check(zero_stage, False, beta)


class Adapter(ReferenceStrategy):
    """The base model itself; no copy."""

    name: ClassVar[str] = "Adapter"
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    has_own_model: ClassVar[bool] = False

    def check(self, zero_stage: int, adapter: bool, beta: float) -> None:
        """Fits every parallelism, but only LoRA.

        Raises:
            BadInput: all parameters are trained, or beta is 0.
        """
        super().check(zero_stage, adapter, beta)
        if not adapter:
            raise BadInput(
                "reference strategy Adapter needs LoRA: with all parameters trained the base does "
                "not stay"
            )

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
        on_gpu = trainer.accelerator.device.type == "cuda"
        for parameter in unwrap_model(trainer.ref_model).parameters():
            host = parameter.data.to("cpu")
            parameter.data = host.pin_memory() if on_gpu else host

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

    Raises:
        BadInput: sync with a strategy that has no reference of its own.
    """
    sync, strategy = reference.sync, execution.strategy
    if strategy == "Sharded" or (strategy == "Offload" and execution.zero_stage == 3):
        offload = strategy == "Offload" or reference.offload is not None
        return Sharded(sync, offload, trust_remote_code)
    plain = {kind.name: kind for kind in (Clone, Adapter, Offload, NoReference)}
    return plain[strategy](sync)
