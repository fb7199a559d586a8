"""Which engine gets which prompt, and what follows when one fails: the rules alone.

Every engine holds a few prompts at a time and gets the next when it has answered one, so that a fast engine does more,
and one that is lost takes little with it. What it held is sampled again elsewhere, by the same seeds; and so is what it
had answered, unless it was proven once more since.
"""

from collections import deque
from collections.abc import Iterable, Mapping


class Division:
    """The prompts of one generation on their way."""

    def __init__(self, prompts: Iterable[int], capacity: int) -> None:
        """`capacity` is the number of prompts that an engine holds at a time, at least 1."""
        self._waiting = deque(prompts)
        self._capacity = max(1, capacity)
        self._held: dict[int, set[int]] = {}
        """Prompts by engine."""
        self._unsettled: dict[int, set[int]] = {}
        """Answered prompts by engine, as long as it was not proven again."""

    @property
    def done(self) -> bool:
        """Whether every prompt has been answered."""
        return not self._waiting and not any(self._held.values())

    @property
    def held(self) -> Mapping[int, set[int]]:
        """The prompts that each engine holds."""
        return self._held

    @property
    def unsettled(self) -> list[int]:
        """The engines that have answered prompts and were not proven since."""
        return [engine for engine, prompts in self._unsettled.items() if prompts]

    def assign(self, engines: Iterable[int]) -> list[tuple[int, int]]:
        """Engines with their next prompts: always the engine that holds the fewest, of several the first."""
        live = list(engines)
        given = []
        while self._waiting and live:
            engine = min(live, key=lambda one: (len(self._held.get(one, ())), one))
            held = self._held.setdefault(engine, set())
            # The engine with the fewest prompts is full, so all are.
            if len(held) >= self._capacity:
                break
            prompt = self._waiting.popleft()
            held.add(prompt)
            given.append((engine, prompt))
        return given

    def answered(self, engine: int, prompt: int) -> None:
        """An engine has completed a prompt."""
        self._held[engine].remove(prompt)
        self._unsettled.setdefault(engine, set()).add(prompt)

    def settled(self, engine: int) -> None:
        """An engine was proven again: what it has answered stands."""
        self._unsettled.pop(engine, None)

    def lost(self, engine: int) -> list[int]:
        """An engine is lost: its prompts wait again, before all others; returns them."""
        prompts = sorted(self._held.pop(engine, set()) | self._unsettled.pop(engine, set()))
        self._waiting.extendleft(reversed(prompts))
        return prompts


def capacity(max_sequences: int, completions: int) -> int:
    """Prompts that fill an engine twice: a slot that a short completion leaves is taken by the next prompt at once."""
    return 2 * -(-max_sequences // max(1, completions))
