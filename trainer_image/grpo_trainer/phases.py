"""Measures the parts of a step: seconds, and the peak of device memory, of generate, reward, reference, forward,
backward and step.

Exists so that a slow or hungry part has a name, and so that the plan's memory prediction can be compared phase by
phase. Switched by engine.py and the callbacks, read once per step by pulse.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("generate", "reward", "reference", "forward", "backward", "step")


class PhaseClock:
    """Adds up the time of each phase within a step; a phase inside another interrupts it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.peaks = dict.fromkeys(PHASES, 0)
        self._current: str | None = None
        self._since = 0.0
        self._measures_memory = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch 2.15

    def enter(self, phase: str | None) -> str | None:
        """End the current phase and begin another, or none; returns the one that ended."""
        now = time.perf_counter()
        ended = self._current
        if ended is not None:
            self.seconds[ended] += now - self._since
            self._read_peak(ended)
        if self._measures_memory:
            torch.cuda.reset_peak_memory_stats()
        self._current, self._since = phase, now
        return ended

    def _read_peak(self, phase: str) -> None:
        if self._measures_memory:
            self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround a phase; afterwards the interrupted one goes on."""
        interrupted = self.enter(name)
        try:
            yield
        finally:
            self.enter(interrupted)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and start anew."""
        self.enter(self._current)
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
