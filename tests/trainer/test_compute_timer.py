"""The time of a rank's own compute: which steps are measured, what is in it, and what is not."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from grpo_trainer.telemetry import compute_timer
from grpo_trainer.telemetry.compute_timer import ComputeTimer, Stopwatch, decoder_layers
from grpo_trainer.telemetry.step_exchange import FIELDS, rank_seconds


class Seconds:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def measured_steps(slow_from: int, steps: int = 60) -> list[int]:
    """Which steps are measured if a rank is slow from one of them on."""
    timer = ComputeTimer()
    measured = []
    for step in range(1, steps + 1):
        was_slow = timer.is_on and step - 1 >= slow_from
        timer.begin_step(step, has_slow_rank=was_slow)
        if timer.is_on:
            measured.append(step)
    return measured


def test_one_step_of_ten_is_measured_and_five_in_a_row_where_a_rank_is_slow() -> None:
    assert measured_steps(slow_from=99) == [2, 3, 4, 5, 6, 12, 22, 32, 42, 52]
    assert measured_steps(slow_from=15, steps=40) == [
        2, 3, 4, 5, 6, 12, *range(22, 27), *range(32, 37),
    ]  # fmt: skip


class Linear(nn.Linear):
    """A layer's part that computes for a second; ZeRO-3 gathers its parameters first."""

    def __init__(self, clock: Seconds, *, is_partitioned: bool) -> None:
        super().__init__(2, 2)
        self.clock = clock
        if is_partitioned:
            self.ds_id = 1
            self.register_forward_pre_hook(lambda *_: clock.pass_by(100.0))
            self.register_forward_hook(lambda *_: clock.pass_by(50.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.clock.pass_by(1.0)
        return super().forward(input)


class Decoder(nn.Module):
    """Two layers of two parts, an embedding before them, and half a second of a layer's own."""

    def __init__(self, clock: Seconds, *, is_partitioned: bool) -> None:
        super().__init__()
        self.clock = clock
        self.heads = nn.ModuleList([nn.Linear(1, 1)])
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Sequential(*(Linear(clock, is_partitioned=is_partitioned) for _ in "ab"))
            layer.register_forward_pre_hook(lambda *_: clock.pass_by(1000.0))
            self.layers.append(layer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.clock.pass_by(10.0)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("is_partitioned", [True, False])
def test_only_the_layers_own_compute_counts(
    monkeypatch: pytest.MonkeyPatch, is_partitioned: bool
) -> None:
    clock = Seconds(monkeypatch)
    model, timer = Decoder(clock, is_partitioned=is_partitioned), ComputeTimer()
    assert decoder_layers(model) == list(model.layers)
    with timer.measure_pass(model, 7):
        model(torch.zeros(1, 2))
    assert timer.take() == (0.0, 0), "no step has been announced"
    timer.begin_step(2)
    for _ in range(3):
        with timer.measure_pass(model, 7):
            model(torch.zeros(1, 2))
    assert timer.take() == (12.0, 21), "four seconds a pass"
    assert timer.take() == (0.0, 0)
    for _ in range(compute_timer.PASSES + 5):
        with timer.measure_pass(model, 7):
            model(torch.zeros(1, 2))
    assert timer.take() == (4.0 * compute_timer.PASSES, 7 * compute_timer.PASSES)
    assert not any(
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if getattr(hook, "__self__", None) is timer
    ), "no hook stays"


def test_a_pass_that_fails_leaves_no_hook_and_no_open_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Seconds(monkeypatch)
    model, timer = Decoder(clock, is_partitioned=True), ComputeTimer()
    timer.begin_step(2)
    with pytest.raises(RuntimeError), timer.measure_pass(model, 7):
        model(torch.zeros(1, 3))
    timer.take()
    clock.pass_by(1e6)
    with timer.measure_pass(model, 7):
        model(torch.zeros(1, 2))
    assert timer.take() == (4.0, 7)


class Event:
    """Stands for a CUDA event, of which this machine has none: a moment of the GPU's time."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_done = False

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, end: "Event") -> float:
        assert self.at <= end.at
        return (end.at - self.at) * 1000


def test_on_a_gpu_the_gpu_s_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch()
    for begin, pause, end in ((1.0, 3.0, 10.0), (20.0, 20.5, 30.0)):
        Event.now = begin
        watch.begin_run()
        Event.now = pause
        watch.stop()
        Event.now = end
        watch.start()
        watch.stop()
    watch.stop()
    assert watch.take_runs() == [2.0, 0.5]
    assert watch.take_runs() == []


def exchanged(*places: tuple[float, float]) -> torch.Tensor:
    """Rows with these seconds and tokens."""
    rows = torch.zeros(len(places), len(FIELDS), dtype=torch.float64)
    for row, (seconds, tokens) in zip(rows, places, strict=True):
        row[FIELDS.index("compute_seconds")] = seconds
        row[FIELDS.index("compute_tokens")] = tokens
    return rows


def test_ranks_are_compared_at_equally_many_tokens() -> None:
    assert rank_seconds(exchanged((3.0, 300), (1.0, 100))) == [2.0, 2.0]
    assert rank_seconds(exchanged((3.0, 200), (1.0, 200))) == [3.0, 1.0]
    nothing: Any = exchanged((0.0, 0), (0.0, 0))
    assert rank_seconds(nothing) == []
