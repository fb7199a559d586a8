"""Measures how long this rank computes outside of every collective.

It measures one step of ten. At first, and while a rank is slow, it measures five in a row.

The time of a phase does not show a slow rank. Under ZeRO-3 the others wait for it inside the
gathers of generation, reference and forward pass, so that all take the same time. What is measured
here is the time of the decoder's layers in the passes that score completions. Left out is what
DeepSpeed does before and after each of their modules: gathers and releases of parameters. Under DDP
and ZeRO-2 there are none within a layer, and their all-reduce belongs to the backward pass.

Hooks are set for a measured pass alone. A hook of ours must run between DeepSpeed's and the module,
and TRL removes DeepSpeed's hooks and sets them again around each generation.

On a GPU the times are those between CUDA events, which are read once the step is over.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

EVERY_STEPS = 10
FIRST_STEP = 2
"""The first step is not measured: kernels are compiled and caches filled in it."""
RECHECKS = 4
"""Further steps that are measured at first, and while a rank is slow: the rule wants several."""
PASSES = 8
"""Passes of a step that are measured: under ZeRO-3 the hooks of 28 layers take 17 ms of each, and
a step of many micro-batches has dozens."""


class Stopwatch:
    """Times runs of layers, which may pause: of the GPU's work where this process has one."""

    def __init__(self) -> None:
        self._uses_gpu = False
        self._began: Any = None
        self._runs: list[list[tuple[Any, Any]]] = []
        """Begin and end of each span, by run."""

    # The arguments are those of a module's hooks.
    def begin_run(self, *_: Any) -> None:
        """Start the watch for another run."""
        self._uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch 2.15
        self._runs.append([])
        self.start()

    def start(self, *_: Any) -> None:
        """Go on after a pause."""
        self._began = self._now()

    def stop(self, *_: Any) -> None:
        """Pause, or end the run. Does nothing where the watch is not running."""
        if self._began is not None:
            self._runs[-1].append((self._began, self._now()))
            self._began = None

    def _now(self) -> Any:
        if not self._uses_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take_runs(self) -> list[float]:
        """Return the seconds of each run since the last call."""
        runs, self._runs, self._began = self._runs, [], None
        if self._uses_gpu and runs and runs[-1]:
            # The step's loss has been read by now, so that nothing is waited for.
            runs[-1][-1][1].synchronize()
        return [sum(self._seconds(*span) for span in spans) for spans in runs]

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000.0 if self._uses_gpu else float(end - begin)


class ComputeTimer:
    """The seconds of this rank's own compute in a step, and the tokens that they were for."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._rechecks_left = 0
        self._tokens = 0
        self._passes = 0
        self.is_on = False
        """True in a step that is measured."""

    def begin_step(self, step: int, *, has_slow_rank: bool = False) -> None:
        """Decide whether this optimizer step is measured; every rank must decide alike.

        `has_slow_rank`: the step before was measured, and a rank was slow in it.
        """
        if step % EVERY_STEPS == FIRST_STEP:
            self._rechecks_left = RECHECKS
            self.is_on = True
            return
        is_first = step <= FIRST_STEP + RECHECKS
        self.is_on = self._rechecks_left > 0 and (is_first or has_slow_rank)
        self._rechecks_left = self._rechecks_left - 1 if self.is_on else 0

    @contextmanager
    def measure_pass(self, model: nn.Module, tokens: int) -> Iterator[None]:
        """Surround a forward pass over `tokens` tokens, padding included."""
        if not self.is_on or self._passes >= PASSES:
            yield
            return
        self._passes += 1
        handles = [handle for layer in decoder_layers(model) for handle in self._hook_layer(layer)]
        self._tokens += tokens
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> tuple[float, int]:
        """Return seconds and tokens since the last call; zeros where nothing was measured.

        The seconds are those of the median layer, times the layers: a moment in which the process
        had no core lengthens one of them.
        """
        tokens, self._tokens, self._passes = self._tokens, 0, 0
        runs = self._watch.take_runs()
        return (median(runs) * len(runs) if runs else 0.0), tokens

    def _hook_layer(self, layer: nn.Module) -> Iterator[RemovableHandle]:
        """The layer runs between start and stop, but for the gathers and releases within it."""
        watch = self._watch
        yield layer.register_forward_pre_hook(watch.begin_run)
        yield layer.register_forward_hook(watch.stop, prepend=True)
        for module in layer.modules():
            if module is not layer and _is_partitioned(module):
                yield module.register_forward_pre_hook(watch.stop, prepend=True)
                yield module.register_forward_pre_hook(watch.start)
                yield module.register_forward_hook(watch.stop, prepend=True)
                yield module.register_forward_hook(watch.start)


def _is_partitioned(module: nn.Module) -> bool:
    """Return True if DeepSpeed gathers parameters when the module runs: it has numbered it, and the
    module has parameters of its own, or children that are gathered with it."""
    if not hasattr(module, "ds_id"):
        return False
    has_parameters = next(module.parameters(recurse=False), None) is not None
    return has_parameters or any(not hasattr(child, "ds_id") for child in module.children())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that the model repeats: its list of modules with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_num_parameters, default=None)
    return [] if largest is None else list(largest)


def _num_parameters(module: nn.Module) -> int:
    # Under ZeRO-3 a parameter that is not gathered has no elements.
    return sum(getattr(each, "ds_numel", each.numel()) for each in module.parameters())
