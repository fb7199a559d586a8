"""Measures the phases of a step: seconds, and the peak of device memory.

A slow or hungry phase thus has a name, and the plan's memory prediction is compared phase by phase.
Everything before the first of them is the phase `load`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from grpo_api.report.report import LOAD, STEP_PHASES, Result

from ..runtime.errors import classify_error

MEMORY = (LOAD, *STEP_PHASES)
"""Phases whose peak of allocated bytes is kept."""


class PhaseClock:
    """Adds up the time of each phase within a step; a phase inside another interrupts it."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Starts in the phase of loading; `now` is a clock that never goes back, in seconds."""
        self._now = now
        self.on_phase_change: Callable[[str | None], None] = lambda _: None
        """Called at every change of phase with the new one."""
        self.seconds = dict.fromkeys(STEP_PHASES, 0.0)
        self.peaks = dict.fromkeys(MEMORY, 0)
        self.reserved = 0
        """Most bytes that the caching allocator held of the device."""
        self.shortage: tuple[str, int] | None = None
        """The phase that device memory did not suffice for, and the peak of allocated bytes in it
        by then."""
        self._unmapped = 0
        """See leave_out."""
        self._current: str | None = LOAD
        self._last = LOAD
        self._since = 0.0

    def enter(self, phase: str | None) -> str | None:
        """End the current phase and begin another, or none; returns the one that ended, which
        loading does for good."""
        now = self._now()
        self.on_phase_change(phase)
        ended = self._current
        self._last = ended or self._last
        if ended in self.seconds:
            self.seconds[ended] += now - self._since
        if _has_cuda_context():
            if ended is not None:
                self.peaks[ended] = max(self.peaks[ended], self._peak())
            reserved = torch.cuda.max_memory_reserved() - self._unmapped
            self.reserved = max(self.reserved, reserved)
            torch.cuda.reset_peak_memory_stats()
        self._current, self._since = phase, now
        return None if ended == LOAD else ended

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround a phase; afterwards the interrupted one goes on."""
        interrupted = self.enter(name)
        try:
            yield
        except RuntimeError as error:
            # cuBLAS, NCCL and vLLM's sleep raise no torch.OutOfMemoryError.
            if classify_error(error)[0] is Result.OUT_OF_MEMORY:
                self.record_shortage()
            raise
        finally:
            self.enter(interrupted)

    def record_shortage(self) -> tuple[str, int]:
        """Remember that device memory did not suffice for what runs now: the innermost phase, which
        says so first."""
        peak = self._peak() if _has_cuda_context() else 0
        if not self.shortage:
            phase = self._current or self._last
            self.shortage = phase, peak
        return self.shortage

    def leave_out(self, size: int) -> None:
        """From now on, do not count `size` bytes that torch's allocator has as allocated.

        An engine that sleeps gives their memory back to the device without it (vLLM's cumem.py):
        with them every phase of training would seem to need the engine's weights and cache.
        """
        self.enter(self._current)
        self._unmapped = size

    def _peak(self) -> int:
        return int(torch.cuda.max_memory_allocated()) - self._unmapped

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them to 0."""
        self.enter(self._current)
        phase_seconds, self.seconds = self.seconds, dict.fromkeys(STEP_PHASES, 0.0)
        return phase_seconds


def device_bytes() -> int:
    """Bytes in use of this process's GPU: allocator, context and communicators of all who use it; 0
    on CPUs."""
    if not _has_cuda_context():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _has_cuda_context() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch 2.15
