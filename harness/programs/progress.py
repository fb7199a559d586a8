"""Say what is being made and for how long, while it is being made: a first build takes minutes and must not be silent.

On a terminal one line is rewritten each second; in a log a line appears every 15 s.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

LOG_SECONDS = 15


@contextmanager
def progress(what: str, detail: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Report `building <what> … <seconds> s <detail>` until the block ends, then how long it took."""
    began = time.monotonic()
    done = Event()
    reporter = Thread(target=_report, args=(what, detail, done, began), daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    _say(f"built {what} in {time.monotonic() - began:.0f} s", end="\n")


def _report(what: str, detail: Callable[[], str], done: Event, began: float) -> None:
    terminal = sys.stderr.isatty()
    while True:
        _say(f"building {what} … {time.monotonic() - began:.0f} s {detail()}".rstrip(), end="\r" if terminal else "\n")
        if done.wait(1 if terminal else LOG_SECONDS):
            return


def _say(text: str, end: str) -> None:
    sys.stderr.write(text + end)
    sys.stderr.flush()
