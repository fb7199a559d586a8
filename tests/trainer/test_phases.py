"""The parts of a step: their seconds, and the memory of a GPU, whose counters are faked here for
want of one."""

import pytest
import torch

from grpo_trainer.telemetry.phases import PhaseClock, device_bytes


class Counters:
    """torch.cuda's memory statistics: a current value, and the peaks since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: self.peak + 5)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))

    def reset(self) -> None:
        """The peak falls to what is allocated."""
        self.peak = self.now

    def use(self, amount: int, left: int) -> None:
        """Allocates up to `amount`, of which `left` stays."""
        self.peak, self.now = max(self.peak, amount), left


def test_each_phase_has_its_own_peak_and_loading_is_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters, clock = Counters(monkeypatch), PhaseClock(lambda: 0.0)
    counters.use(70, left=40)
    for forward in (60, 55):
        with clock.phase("generate"):
            counters.use(50, left=40)
        with clock.phase("forward"):
            counters.use(forward, left=60)
            with clock.phase("reference"):
                counters.use(90, left=42)
        counters.use(99, left=40)
        clock.take_seconds()
    assert clock.peaks == {
        **{"load": 70, "sync": 0, "generate": 50, "reward": 0, "reference": 90, "forward": 60},
        **{"backward": 0, "step": 0},
    }
    assert clock.reserved == 104
    assert device_bytes() == 70


def test_what_a_sleeping_engine_gave_back_is_in_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, clock = Counters(monkeypatch), PhaseClock(lambda: 0.0)
    # torch's allocator goes on to count the engine's 60.
    counters.use(100, left=60)
    clock.leave_out(60)
    for _ in range(2):
        with clock.phase("generate"):
            with clock.phase("sync"):
                counters.use(70, left=60)
                clock.leave_out(0)
                counters.use(75, left=60)
            counters.use(95, left=60)
            clock.leave_out(60)
            counters.use(90, left=65)
        with clock.phase("forward"):
            counters.use(85, left=60)
            assert clock.record_shortage() == ("forward", 25)
    wanted = {"load": 100, "sync": 75, "generate": 95, "forward": 25}
    assert {name: peak for name, peak in clock.peaks.items() if peak} == wanted
    assert clock.reserved == 105


def test_memory_that_an_engine_lacks_when_it_wakes_is_a_shortage_of_the_sync() -> None:
    """vLLM's allocator raises no torch.OutOfMemoryError (vLLM issue 13941)."""
    clock = PhaseClock(lambda: 0.0)
    message = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
    with pytest.raises(RuntimeError), clock.phase("generate"), clock.phase("sync"):
        raise RuntimeError(message)
    assert clock.record_shortage()[0] == "sync"


def test_loading_is_no_part_of_a_step_s_time() -> None:
    now = iter([1.0, 3.0, 3.0])
    clock = PhaseClock(lambda: next(now))
    with clock.phase("forward"):
        pass
    taken = clock.take_seconds()
    assert "load" not in taken
    assert taken["forward"] == 2.0
    assert (set(clock.peaks.values()), device_bytes()) == ({0}, 0)
