"""Who fetches a repository into a cache that pods and jobs share: a file beside it, whose holder keeps changing it.

Others wait while it changes. A holder that was killed changes nothing more, and after a while one of them takes over;
the time is that of who waits, since clocks of nodes differ. Locks of the file system are not relied on: not every
network file system has them, and some keep those of the dead. Should two hold it for a moment after all, a file is
fetched twice and none is damaged: huggingface_hub writes each under a name of its own, to be renamed when it is whole.
"""

import os
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_api.text.clock import Clock

from ..clock import SYSTEM_CLOCK
from ..files import write_atomically
from ..pauses import POLL_SECONDS

STALE_SECONDS = 60.0
"""How long a lease must stay as it is until its holder counts as dead: many times POLL_SECONDS."""


class Lease:
    """One lease, held or waited for."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = path
        self._clock = clock
        self._owner = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._beats = 0
        self._lock = threading.Lock()  # a beat that ends after the release would leave a lease that nobody holds

    def take(self, heard: Callable[[], None]) -> bool:
        """Wait for the lease and take it. Return True if an earlier holder died with it.

        Args:
            heard: called whenever the present holder has shown that it lives.

        Raises:
            OSError: the folder can't be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        seen, since, died = "", self._clock.now(), False
        while not self._created():
            text = _text(self.path)
            if text != seen:
                seen, since = text, self._clock.now()
                heard()
            elif self._clock.now() - since >= STALE_SECONDS:
                self._end(seen)
                died = True
                continue
            self._clock.sleep(POLL_SECONDS)
        return died

    def beat(self) -> None:
        """Show that the holder lives; nothing while another holds it."""
        with self._lock:
            if self._ours:
                self._beats += 1
                with suppress(OSError):  # a full disk: what is fetched fails of it too, and says so
                    write_atomically(self.path, self._content())

    def release(self) -> None:
        """Give up the lease, if this process still holds it."""
        with self._lock:
            if self._ours:
                self.path.unlink(missing_ok=True)

    @property
    def _ours(self) -> bool:
        return _text(self.path).startswith(f"{self._owner} ")

    def _created(self) -> bool:
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _content(self) -> str:
        return f"{self._owner} {self._beats}\n"

    def _end(self, seen: str) -> None:
        """Put a dead holder's lease away. Of several that try only one gets the file; a new holder's is put back."""
        grave = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.rename(grave)
        except FileNotFoundError:
            return
        if _text(grave) != seen and not self.path.exists():
            grave.rename(self.path)
        grave.unlink(missing_ok=True)


def _text(path: Path) -> str:
    """The text of a lease file; empty if it does not exist or is being changed."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
