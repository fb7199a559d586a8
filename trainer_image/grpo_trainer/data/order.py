"""The order of the prompts in any pass over them, whatever the process has seen before.

TRL's sampler keeps a generator that moves on with every pass, and no checkpoint has it: a process that resumes in the
third pass would repeat the order of the first.
"""

from typing import Any

import torch


def rewind(sampler: Any, epoch: int) -> None:
    """Put TRL's RepeatSampler where it is after `epoch` whole passes, so that the next pass is pass `epoch`.

    It draws one permutation per pass. A million prompts cost about 10 ms per finished pass.
    """
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
