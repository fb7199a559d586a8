"""A ledger of the live bytes of real training: torch.profiler's memory events, matched to who
allocated.

The events see what a dispatch mode misses: bare storages, `resize_`, buffers of the backward pass.
The profiler's own Python stacks take a minute to write, so only the functions that ledger_sites.py
watches leave marks.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile

from . import ledger_sites

SITE, PHASE, WHOLE = "site:", "phase:", "whole"
Peaks = dict[str, dict[str, dict[str, int]]]
"""By phase and memory (`device`, `host`) the bytes of each site when most were live at once."""


class Event(NamedTuple):
    """A change of what is live, of the phase or of what a phase belongs to."""

    time: int
    kind: str
    """The name of a phase that begins, a site that runs (until `end`), or "" for an allocation."""
    end: int = 0
    pointer: int = 0
    size: int = 0
    """Bytes of an allocation; below zero, of what is freed."""
    sites: tuple[str, ...] = ()
    """Watched functions that run, from the outermost on."""
    operator: str = ""
    """The outermost torch operator below the innermost of them."""


class LiveLedger:
    """Records what runs within `recording`; then tells each phase's peaks, and what was live at
    them."""

    def __init__(self, table: ledger_sites.Table) -> None:
        self._table = table
        self._names: dict[CodeType, str] = {}
        self._open: list[Any] = []
        self._events: list[Event] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Profiles what this thread runs within.

        Garbage is collected between phases only: elsewhere it might be by another thread, which the
        profiler doesn't see, and at other moments in each run.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with profiler, _RecordFunctionFast(WHOLE):
            sys.setprofile(self._trace)
            try:
                yield
            finally:
                sys.setprofile(None)
                gc.enable()
                gc.unfreeze()
        assert profiler.profiler is not None
        self._read(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]

    def phase(self, name: str | None) -> None:
        """Says that a phase begins; None is what is between phases."""
        gc.collect()
        with _RecordFunctionFast(f"{PHASE}{name or 'between'}"):
            pass

    def _trace(self, frame: FrameType, event: str, _: object) -> None:
        """Python calls this at every call and return; a watched function is a record while it
        runs."""
        name = self._name(frame.f_code) if event in ("call", "return") else ""
        if name and event == "call":
            record = _RecordFunctionFast(SITE + name)
            record.__enter__()
            self._open.append(record)
        elif name and self._open:
            self._open.pop().__exit__(None, None, None)

    def _name(self, code: CodeType) -> str:
        """`file.py:function` of a watched function, "" of another."""
        if code not in self._names:
            name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
            self._names[code] = name if ledger_sites.watched(code.co_filename, name) else ""
        return self._names[code]

    def _read(self, roots: list[Any]) -> None:
        """Walks the tree from the top: an event only knows its parents as long as somebody holds
        them."""
        waiting: list[tuple[Any, tuple[str, ...], str]] = [(root, (), "") for root in roots]
        whole_thread = next(root.start_tid for root in roots if root.name == WHOLE)
        while waiting:
            event, sites, operator = waiting.pop()
            name = event.name
            if event.tag == _EventType.Allocation:
                allocated = event.extra_fields
                sites = sites if event.start_tid == whole_thread else (ledger_sites.OTHER_THREAD,)
                self._events.append(
                    Event(
                        event.start_time_ns,
                        "",
                        0,
                        allocated.ptr,
                        allocated.alloc_size,
                        sites,
                        operator,
                    )
                )
            elif name.startswith(SITE):
                sites, operator = (*sites, name.removeprefix(SITE)), ""
                self._events.append(Event(event.start_time_ns, sites[-1], event.end_time_ns))
            elif name.startswith(PHASE):
                self._events.append(Event(event.start_time_ns, name))
            elif name.startswith("aten::"):
                operator = operator or name
            waiting += [(child, sites, operator) for child in event.children]
        self._events.sort(key=lambda event: event.time)

    def peaks(self) -> Peaks:
        """What was live when most was, in each phase."""
        book = _Book(self._table)
        phase, step_ends = "load", 0
        for event in self._events:
            if event.kind.startswith(PHASE):
                phase = event.kind.removeprefix(PHASE)
            elif event.kind in ledger_sites.STEP:
                step_ends = max(step_ends, event.end)
            elif event.kind in ledger_sites.MOVES:
                book.move()
            elif not event.kind:
                book.enter(event, "step" if event.time < step_ends else phase)
        return book.peaks


class _Book:
    """What is live now, and at each phase's peak."""

    def __init__(self, table: ledger_sites.Table) -> None:
        self._table = table
        self._live: dict[int, tuple[str, str, int]] = {}
        self._now: dict[str, Counter[str]] = {
            memory: Counter() for memory in ("device", "host", "network")
        }
        self._total: Counter[str] = Counter()
        self._highest: Counter[tuple[str, str]] = Counter()
        self.peaks: Peaks = {}

    def enter(self, event: Event, phase: str) -> None:
        """One allocation or release.

        What another thread frees without a word, the network's, is noticed when the address is
        handed out again.
        """
        if event.pointer in self._live:
            memory, site, size = self._live.pop(event.pointer)
            self._change(memory, site, -size)
        if event.size > 0:
            place = self._table.place(event.sites, event.operator, event.size)
            self._live[event.pointer] = (
                place,
                " ".join([*event.sites[-1:], event.operator]).strip(),
                event.size,
            )
            self._change(*self._live[event.pointer])
        best = self.peaks.setdefault(phase, {})
        for memory in ("device", "host"):
            if self._total[memory] > self._highest[phase, memory] or memory not in best:
                self._highest[phase, memory] = self._total[memory]
                best[memory] = {site: size for site, size in self._now[memory].items() if size}

    def _change(self, memory: str, site: str, size: int) -> None:
        self._now[memory][site] += size
        self._total[memory] += size

    def move(self) -> None:
        """What was read on the host goes to the device."""
        for pointer, (memory, site, size) in self._live.items():
            if memory == "host" and site.startswith(ledger_sites.LOADED):
                self._live[pointer] = ("device", site, size)
                self._change("host", site, -size)
                self._change("device", site, size)
