"""vLLM engines in pods of their own: rank 0 brings them the weights, splits the prompts over them, and replaces none.

A dead engine's pod is replaced by its Job; here it is used again once it has come back and was proven to have the
present weights. As long as one engine is left, the run goes on with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from grpo_api.text.clock import Clock

from ..clock import SYSTEM_CLOCK
from ..gang import ranks
from .base import EngineGeneration, EngineSetup, Sample
from .engines_main import EnginesMain
from .led import led
from .sampling import sampling_arguments


class ServersGeneration(EngineGeneration):
    """The engines of the attempt."""

    def __init__(
        self, setup: EngineSetup, model: nn.Module, stop_tokens: list[int], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Wait for the engines. A collective.

        Raises:
            RendezvousTimeout: none came within guard.rendezvousTimeoutSeconds.
            BadInput: this model's weights in an engine can't be proven.
        """
        super().__init__(setup, model, stop_tokens)
        self._clock = clock
        self._main = EnginesMain(setup, model, clock) if ranks.rank() == 0 else None
        self._led(lambda main: main.await_engines())

    def attempt_sync(self, version: int) -> Sequence[str]:
        """Bring the weights to every engine that has not this version; those that differ once more, if others have it.

        Raises:
            WeightSyncTimeout: no engine took them in guard.weightSyncTimeoutSeconds.
        """
        wrong: list[str] = []
        began = self._clock.now()
        # Engines that came during a pass get a pass of their own, until none lacks this version.
        while self._led(lambda main: main.begin(version, began)):
            sending = self._main.sending if self._main else None
            # On every rank: under ZeRO-3 each tensor is gathered from all of them.
            for name, tensor in self.weights():
                if sending:
                    sending.send(name, tensor)
            wrong = self._led(lambda main: main.finish())
            if wrong:
                break
        if self._main:
            self.timed(*self._main.seconds(self._clock.now() - began))
        return wrong

    def sample(self, prompts: list[list[int]], seeds: list[int]) -> list[Sample]:
        """All ranks' prompts over all engines.

        Raises:
            EngineLost: no engine was left, and none came back in guard.weightSyncTimeoutSeconds.
        """
        wanted = ranks.gather(list(zip(prompts, seeds, strict=True)))
        arguments = sampling_arguments(self.setup.plan.training, self.stop_tokens)
        of_all_ranks = [one for part in wanted for one in part]
        self._led(lambda main: main.want(of_all_ranks, arguments))
        while not self._led(lambda main: main.complete(self.proven)):
            self._led(lambda main: main.await_another())
            # An engine that comes has random weights, so it is sent the policy's under a new number.
            self.sync_weights()
        if self._main:
            self.failures += self._main.taken_failures()
        return self._own([len(part) for part in wanted])

    def changed(self) -> Sequence[str]:
        """None: `sample` has proven every engine once more, and sampled again elsewhere what others had."""
        return ()

    def _own(self, counts: list[int]) -> list[Sample]:
        """This rank's part of all completions."""
        parts: list[list[Sample]] = []
        if self._main:
            samples, first = self._main.samples(), 0
            for count in counts:
                parts.append(samples[first : first + count])
                first += count
        if ranks.world_size() == 1:
            return parts[0]
        # Rank 0 alone has the completions.
        own: list[Any] = [None]
        dist.scatter_object_list(own, parts or None, src=0)
        mine: list[Sample] = own[0]
        return mine

    def _led(self, work: Callable[[EnginesMain], Any]) -> Any:
        """What rank 0 does with its engines, while all wait."""

        def on_main() -> Any:
            assert self._main is not None  # this is rank 0
            return work(self._main)

        return led(on_main, self._sign)

    def _sign(self) -> None:
        self.setup.event()
        if self._main:
            self.setup.logged(self._main.metrics(self.proven))
