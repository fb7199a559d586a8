"""Computes the order of prompts for every pass from the seed alone, so a resumed run repeats
nothing. Generations that diverged are left out; later ones move up.

TRL's sampler keeps a generator that moves on with every pass, and no checkpoint has it. So a
process that resumes in the third pass would repeat the order of the first.

The order is one sequence of generations over all passes, numbered from 0; a generation is the
prompts that are answered at once. What a run diverged on is taken out of it
(spec.guard.onDivergence: Rollback). All that follows moves up, from the next pass into this one,
too. So passes keep their length and the run its steps, and what comes before stays.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch.utils.data import Sampler

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.revisions import Generations
from grpo_api.spec.training import TrainingSpec


def rewind_sampler(sampler: Any, epoch: int) -> None:
    """Put TRL's RepeatSampler where it is after `epoch` whole passes, so that the next pass is pass
    `epoch`.

    It draws one permutation per pass. A million prompts cost about 10 ms per finished pass.
    """
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def merge_spans(skipped: Iterable[Generations]) -> tuple[Generations, ...]:
    """The same generations as disjoint spans in order."""
    merged: list[Generations] = []
    for span in sorted(skipped, key=lambda span: span.first):
        if merged and span.first <= merged[-1].last + 1:
            merged[-1] = Generations(first=merged[-1].first, last=max(merged[-1].last, span.last))
        else:
            merged.append(span)
    return tuple(merged)


def generation_number(position: int, skipped: Sequence[Generations]) -> int:
    """Number of the generation that a run trains on after `position` others; `skipped` is
    merged."""
    for span in skipped:
        if position < span.first:
            break
        position += span.last - span.first + 1
    return position


class PromptOrder(Sampler[int]):
    """TRL's RepeatSampler, begun in any pass, without the generations that are left out."""

    def __init__(self, sampler: Any, skipped: Sequence[Generations]) -> None:
        """`sampler` is TRL's, `skipped` is merged."""
        self._sampler = sampler
        self._skipped = skipped
        self.epoch = 0
        """The pass, from 0, that is given next."""

    def __len__(self) -> int:
        """Elements of a pass: every prompt as often as it is answered and trained on."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        """The pass `epoch`; what was moved up into it comes from the passes after it."""
        per_pass = self._sampler.num_samples // self._sampler.batch_size
        positions = range(self.epoch * per_pass, (self.epoch + 1) * per_pass)
        numbers = (generation_number(position, self._skipped) for position in positions)
        for epoch, wanted in groupby(numbers, lambda number: number // per_pass):
            rewind_sampler(self._sampler, epoch)
            size = len(self) // per_pass
            at, source = epoch * per_pass, iter(self._sampler)
            for number in wanted:
                yield from islice(source, (number - at) * size, (number - at + 1) * size)
                at = number + 1


@dataclass(frozen=True, slots=True)
class Cadence:
    """How optimizer steps and generations follow each other."""

    per_pass: int
    """Generations in a pass over the data; prompts that don't fill one are left out."""
    micro_batches: int
    """Micro-batches that a generation is trained on, all iterations together."""
    accumulation: int
    """Micro-batches of a step; the last step of a pass may have fewer."""

    @classmethod
    def from_plan(cls, execution: ExecutionPlan, training: TrainingSpec, prompts: int) -> "Cadence":
        """The cadence of a plan with `prompts` prompts per epoch."""
        completions = execution.micro_batch * execution.world_size * execution.steps_per_generation
        prompts_per_generation = completions // training.num_generations
        return cls(
            per_pass=prompts // prompts_per_generation,
            micro_batches=execution.steps_per_generation * training.num_iterations,
            accumulation=execution.gradient_accumulation,
        )

    def generations_of_step(self, step: int, skipped: Iterable[Generations]) -> Generations:
        """The generations that a step, from 1, trains on, in a run that leaves `skipped` out."""
        in_pass = self.per_pass * self.micro_batches
        passes, update = divmod(step - 1, -(-in_pass // self.accumulation))
        first_micro_batch = update * self.accumulation
        last_micro_batch = min(first_micro_batch + self.accumulation, in_pass) - 1
        left_out, begun = merge_spans(skipped), passes * self.per_pass
        first = begun + first_micro_batch // self.micro_batches
        last = begun + last_micro_batch // self.micro_batches
        return Generations(
            first=generation_number(first, left_out), last=generation_number(last, left_out)
        )

    def is_outdated(
        self, step: int, made_without: Iterable[Generations], skipped: Iterable[Generations]
    ) -> bool:
        """Whether a checkpoint of that step was trained on something that is to be left out now."""
        last = self.generations_of_step(step, made_without).last
        left_out = merge_spans(made_without)
        for span in merge_spans(skipped):
            if span.first > last:
                continue
            end = min(span.last, last)
            # Both lists are merged, so a span that was left out whole lies within one span of the
            # other list.
            if not any(each.first <= span.first and end <= each.last for each in left_out):
                return True
        return False
