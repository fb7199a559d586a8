"""The `model` reward: a frozen sequence-classification model with one label, as TRL takes it.

TRL itself would load a reward model with the policy's settings and prepare it like the policy.
Under DeepSpeed it would be cast to the policy's dtype, or fail for having another. Handed over as a
plain module it keeps its own dtype, is whole on every GPU, and scores in batches of bounded memory.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..weights.models import LoadedModel
from .reward_base import RewardCounters


class RewardModel(nn.Module):
    """Scores tokenized conversations; TRL reads `config._name_or_path` for the metric's name and
    `.logits[:, 0]`."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        batch_size: int,
        counters: RewardCounters,
        device: torch.device | str,
    ) -> None:
        """Moves the frozen model to the device."""
        super().__init__()
        self.__name__ = name
        self.loaded = loaded
        self.model: nn.Module = loaded.model.to(device)
        self.config = SimpleNamespace(_name_or_path=name)
        self._batch_size = batch_size
        self._counters = counters
        self.eval()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """For TRL's `reward_processing_classes`."""
        return self.loaded.tokenizer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        """`.logits` of shape (completions, 1) in float32, from token ids and mask of shape
        (completions, tokens).

        What is no finite number becomes NaN, which is TRL's word for no reward, and is counted.
        """
        size = self._batch_size
        batches = zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True)
        logits = torch.cat(
            [self.model(input_ids=ids, attention_mask=mask).logits.float() for ids, mask in batches]
        )
        broken = logits[~logits.isfinite()]
        if len(broken):
            self._counters.count_failures(
                len(broken), f"a logit of {self.loaded.source.name} is {broken[-1].item()}"
            )
        return SimpleNamespace(logits=logits.where(logits.isfinite(), torch.nan))
