"""Finds and shares the signs of progress of long work: a download, a load, an export.

Libraries don't call back while they read weights or write a checkpoint, so the bytes that the
kernel counts for this process are read. And most ranks wait while one works. Each adds its events
to one counter in the gang's store and reads from it how many the others had. So a peer that works
is not taken for a hang.
"""

import logging
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .recorder import Recorder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # no stubs

log = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
"""Half of the shortest guard.hangTimeoutSeconds."""
LEAST_BYTES = 64 * 1024
"""Bytes in a period that count as progress; what moves without work (a look, a log line) is far
less."""
COUNTERS = Path("/proc/self/io")
COUNTER = "events"


class Heartbeat:
    """One rank's part in it."""

    def __init__(self, recorder: Recorder, store: "Store") -> None:
        """`store` must have no other user: a client waits for its answers one by one."""
        self._recorder = recorder
        self._store: Store | None = store
        self._moved = moved_bytes()
        self._shared_events = self._peer_events = 0

    def start(self) -> None:
        """Start to look and share every PERIOD_SECONDS."""
        threading.Thread(target=self._beat_periodically, name="pulse", daemon=True).start()

    def _beat_periodically(self) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD_SECONDS):
            self.beat()

    def beat(self) -> None:
        """Look once; while it trains only finished steps count, and all ranks finish theirs
        together."""
        if self._recorder.current_stage == "Training":
            return
        moved = moved_bytes()
        if moved - self._moved >= LEAST_BYTES:
            self._recorder.record_event()
        self._moved = moved
        if self._store is not None:
            self._share_events(self._store)

    def _share_events(self, store: "Store") -> None:
        own_events = self._recorder.own_events
        try:
            peer_events = store.add(COUNTER, own_events - self._shared_events) - own_events
        # torch's DistError: rank 0 is gone or can't be reached, which others find out.
        except RuntimeError as error:
            log.warning(f"the progress of other ranks can't be received any more: {error}")
            self._store = None
            return
        self._shared_events = own_events
        if peer_events > self._peer_events:
            self._recorder.record_peer_events(peer_events - self._peer_events)
        self._peer_events = peer_events


def moved_bytes() -> int:
    """Bytes that this process has read and written by system calls and, at least, by mapped files
    (proc_pid_io(5)).

    Where the counters can't be read (a sandbox without /proc/self/io) only mapped files are seen.
    """
    mapped = resource.getrusage(resource.RUSAGE_SELF).ru_majflt * resource.getpagesize()
    if not COUNTERS.is_file():
        return mapped
    counters = dict(line.split(": ") for line in COUNTERS.read_text(encoding="ascii").splitlines())
    return mapped + int(counters["rchar"]) + int(counters["wchar"])
