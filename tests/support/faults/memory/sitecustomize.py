"""Makes a trainer run out of memory in a named phase: a fault for tests.

Put this folder on PYTHONPATH of the training container; Python imports a module of this name by
itself when it starts. HARNESS_MEMORY_FAULT is `phase:entry:fits:kind`. That entry into the phase,
from 1, lacks memory as long as the plan's micro-batch is more than `fits`: of kind `device` it ends
in the exception of torch's CUDA allocator, though there may be no device; of kind `host` it takes
memory until the kernel kills it at its cgroup's limit. Nothing of the product knows of it.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FAULT_ENV = "HARNESS_MEMORY_FAULT"
PHASES = "grpo_trainer.telemetry.phases"
MOST = 4 * 2**30
"""Bytes that are taken of a host at most, should there be no limit."""
MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB"


class Strike(MetaPathFinder):
    """Lets the module of the phases be imported, and puts the fault into its clock."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that does more."""
        if name != PHASES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None, "it is being imported"
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            strike(module, os.environ[FAULT_ENV])

        loader.exec_module = exec_module
        return spec


def strike(module: ModuleType, fault: str) -> None:
    """Replaces the clock's ways into a phase."""
    phase, entry, fits, kind = fault.split(":")
    clock: Any = module.PhaseClock
    real_phase, real_enter, entered = clock.phase, clock.enter, [0]

    def entry_into(name: str | None) -> None:
        entered[0] += name == phase
        if name == phase and entered[0] == int(entry) and micro_batch() > int(fits):
            raise module.torch.OutOfMemoryError(MESSAGE) if kind == "device" else exhausted()

    @contextmanager
    def inside(self: Any, name: str) -> Iterator[None]:
        with real_phase(self, name):
            entry_into(name)
            yield

    def enter(self: Any, name: str | None) -> str | None:
        ended: str | None = real_enter(self, name)
        if name in ("backward", "step"):  # they have no end of their own, so nothing surrounds them
            entry_into(name)
        return ended

    clock.phase, clock.enter = inside, enter


def exhausted() -> MemoryError:
    """Takes host memory, page by page; comes back only where nothing kills the process."""
    taken = bytearray()
    while len(taken) < MOST:
        taken.extend(b"x" * 2**26)
    return MemoryError(f"took {len(taken)} bytes and nobody minded")


def micro_batch() -> int:
    """The plan's, which this process was given."""
    from grpo_api.text.contract import (
        PLAN_ENV,
        PLAN_PATH,
    )  # not before the trainer itself has found its packages

    plan = json.loads(Path(os.environ.get(PLAN_ENV, PLAN_PATH)).read_text(encoding="utf-8"))
    return int(plan["execution"]["microBatch"])


if os.environ.get(FAULT_ENV):
    if PHASES in sys.modules:  # in a process that was forked with all libraries
        strike(sys.modules[PHASES], os.environ[FAULT_ENV])
    else:
        sys.meta_path.insert(0, Strike())
