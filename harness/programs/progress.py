"""Say what is being made and for how long, while it is being made: a first build takes minutes and
must not be silent.

On a terminal one line, of all that is being made, is rewritten each second; in a log each has a
line every 15 s.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

LOG_SECONDS = 15
ERASE_LINE = "\033[K"
_lines: list[Callable[[], str]] = []


@contextmanager
def progress(what: str, detail: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Report `building <what> … <seconds> s <detail>` until the block ends, then how long it
    took."""
    began = time.monotonic()
    done = Event()

    def line() -> str:
        return f"building {what} … {time.monotonic() - began:.0f} s {detail()}".rstrip()

    _lines.append(line)
    reporter = Thread(target=_report, args=(line, done), daemon=True)
    reporter.start()
    try:
        yield
    finally:
        _lines.remove(line)
        done.set()
        reporter.join()
    _say(f"built {what} in {time.monotonic() - began:.0f} s\n")


def _report(line: Callable[[], str], done: Event) -> None:
    terminal = sys.stderr.isatty()
    while True:
        if terminal:
            together = "; ".join(each() for each in list(_lines))
            _say(together[: shutil.get_terminal_size().columns - 1] + "\r")
        else:
            _say(f"{line()}\n")
        if done.wait(1 if terminal else LOG_SECONDS):
            return


def _say(text: str) -> None:
    sys.stderr.write((ERASE_LINE if sys.stderr.isatty() else "") + text)
    sys.stderr.flush()
