"""Strategy Sharded: under ZeRO-3, the checkpoint loaded a second time and partitioned over all ranks.

A partitioned policy can't be copied: between passes its parameters have shape (0,). Rank 0 reads, the others receive
their partitions. With spec.reference.offload the partitions live in host memory and DeepSpeed streams them in
(zero_optimization.offload_param).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, set_hf_deepspeed_config

from grpo_api.spec.training import ReferenceSync

from ..weights.models import freeze, load_causal
from .base import ReferenceStrategy
from .policy_trainer import PolicyTrainer


class Sharded(ReferenceStrategy):
    """A second, frozen model partitioned like the policy."""

    name: ClassVar[str] = "Sharded"
    zero_stages: ClassVar[tuple[int, ...]] = (3,)

    def __init__(self, sync: ReferenceSync | None = None, offload: bool = False, remote_code: bool = False) -> None:
        super().__init__(sync)
        self.offload = offload
        self.remote_code = remote_code

    def build(self, trainer: PolicyTrainer) -> nn.Module:
        """Loads the policy's files again, partitioned as they are read."""
        with self._config(trainer):
            reference: nn.Module = load_causal(trainer.source, self.remote_code)
        return freeze(reference)

    def prepare(self, model: nn.Module, trainer: PolicyTrainer, wrap: Callable[..., Any]) -> nn.Module:
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
        """The policy's DeepSpeed config with the place of the reference's partitions instead of the policy's."""
        config = copy.deepcopy(policy)
        zero = config["zero_optimization"]
        zero.pop("offload_param", None)
        if self.offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        return config

    @contextmanager
    def _config(self, trainer: PolicyTrainer) -> Iterator[None]:
        """transformers' global DeepSpeed config is the reference's inside, the policy's afterwards."""
        policy = trainer.args.hf_deepspeed_config
        reference = HfDeepSpeedConfig(self.config(policy.config))  # kept by name: transformers has but a weak reference
        try:
            yield
        finally:
            set_hf_deepspeed_config(policy)
            del reference
