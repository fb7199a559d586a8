"""Retries requests to the hub with growing pauses and one limit in total, and reports progress
meanwhile."""

import errno
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from grpo_api.text.clock import Clock
from grpo_api.text.messages import connection_problem, error_chain

from ..runtime.clock import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    POLL_SECONDS,
    SYSTEM_CLOCK,
    OnWait,
    ignore_wait,
)
from ..runtime.errors import DiskFailed, HubUnavailable

log = logging.getLogger(__name__)

ReportByteCount = Callable[[int], None]
"""Called with how many bytes have arrived so far: a sign for the watchdog that the process is at
work."""
LEAST_BYTES = 64 * 1024
"""Bytes that count as progress: at one byte per second, a hub would be waited for without end."""
T = TypeVar("T")


class TryLater(Exception):
    """The hub did not answer, or asked to come again."""

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after
        """Seconds that the hub asked to wait."""


class Arrivals:
    """What has arrived on the disk, however it was fetched."""

    def __init__(
        self,
        folders: Sequence[Path],
        report: ReportByteCount,
        clock: Clock = SYSTEM_CLOCK,
        on_wait: OnWait = ignore_wait,
        longest_wait: float = LONGEST_WAIT,
    ) -> None:
        self.folders, self._tell, self._clock = folders, report, clock
        self.report_wait = on_wait
        self.longest_wait = longest_wait
        """Seconds without progress after which the wait is given up."""
        self._last = self._most = 0
        self._grew_at = clock.now()

    def measure(self) -> int:
        """Bytes that have arrived."""
        return sum(map(bytes_in, self.folders))

    def report_change(self) -> None:
        """Measure the bytes that have arrived and report a change."""
        measured = self.measure()
        if measured != self._last:
            self._last = measured
            self._tell(measured)
        if measured >= self._most + LEAST_BYTES:
            self._most, self._grew_at = measured, self._clock.now()
            self.report_wait("")

    def report_again(self) -> None:
        """Report the last measurement again: a sign of work although nothing has arrived."""
        self._tell(self._last)

    def wait(self, seconds: float) -> None:
        """A pause between two tries, in which others hear that somebody is there."""
        end = self._clock.now() + seconds
        while (seconds_left := end - self._clock.now()) > 0:
            self.report_again()
            self._clock.sleep(min(seconds_left, POLL_SECONDS))

    @property
    def silent_seconds(self) -> float:
        """Seconds since there was more than ever before, by LEAST_BYTES."""
        return self._clock.now() - self._grew_at


def bytes_in(folder: Path) -> int:
    """Bytes of the files below a folder, links left out; what vanishes meanwhile counts as
    nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                entry = Path(parent, name).lstat()
                total += entry.st_size if stat.S_ISREG(entry.st_mode) else 0
    return total


@contextmanager
def watch_arrivals(arrivals: Arrivals, beat: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Looks at what arrives while the body runs; `beat` is called each time."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            arrivals.report_change()
            beat()

    thread = threading.Thread(target=watch, name="arrivals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    arrivals.report_change()  # what came after the thread's last look


def retry_passing_errors(action: Callable[[], T], what: str, arrivals: Arrivals) -> T:
    """Return the result of `action`, which is tried again after errors that may pass.

    Raises:
        HubUnavailable: nothing more has arrived for the longest wait, or the hub asks to wait for
            longer than is left.
        DiskFailed: there is no room for it.
        Exception: what else `action` raises; it would do so again.
    """
    pause = FIRST_PAUSE
    host = urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]
    try:
        while True:
            try:
                return action()
            except Exception as error:
                _require_room(error, what, arrivals)
                problem = passing_error(error)
                if problem is None:
                    raise
                arrivals.report_change()
                arrivals.report_wait(connection_problem(error, host))
                wait = max(pause, problem.retry_after)
                if arrivals.silent_seconds + wait > arrivals.longest_wait:
                    asked = problem.retry_after
                    pause_wish = f", and asks for a pause of {asked:.0f} s" if asked else ""
                    raise HubUnavailable(
                        f"{what}: nothing arrived for {arrivals.silent_seconds:.0f} s, the last "
                        f"try failed with: {problem}{pause_wish}"
                    ) from error
            log.warning(f"{what}: {problem}; again in {wait:.0f} s")
            arrivals.wait(wait)
            pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        arrivals.report_wait("")


def passing_error(error: BaseException) -> TryLater | None:
    """The error in words, if the next try may have none; None if it would be the same."""
    # The hub's client, which only a run that asks the hub needs.
    import httpx2

    for cause in error_chain(error):
        if isinstance(cause, TryLater):
            return cause
        if isinstance(cause, OfflineModeIsEnabled | HfHubHTTPError):
            return None
        if isinstance(cause, httpx2.RequestError | ConnectionError | TimeoutError):
            return TryLater(_error_message(cause))
    # hf_xet, which fetches large files, calls a token that has run out a PermissionError, and the
    # rest RuntimeError
    if type(error).__module__.startswith("hf_xet"):
        return TryLater(_error_message(error))
    if isinstance(error, RuntimeError) and "scripts are no longer supported" not in str(error):
        return TryLater(_error_message(error))
    # an answer of the API that was cut
    if isinstance(error, json.JSONDecodeError):
        return TryLater(_error_message(error))
    # a file of another size than announced, a stale handle, an input/output error
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return None if is_unwritable(error) else TryLater(_error_message(error))
    return None


@contextmanager
def answers_of_the_hub() -> Iterator[None]:
    """Raises TryLater where huggingface_hub stumbles, in the body, over an answer of another form
    than the hub's."""
    try:
        yield
    # Of a name in the spec, and of a request: ValueErrors, too.
    except (HFValidationError, HfHubHTTPError):
        raise
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TryLater("an answer that is not the hub's: a proxy's?") from error


MAX_ANSWER = 120
"""Characters of what the hub, or its client, says of a refusal."""


def answer_message(error: BaseException) -> str:
    """What the hub answered, in one line without the URL: it may be a link that needs no token."""
    if not isinstance(error, HfHubHTTPError):
        return " ".join(str(error).split())[:MAX_ANSWER]
    answer = f"HTTP {error.response.status_code} {error.response.reason_phrase}"
    reason = " ".join((error.server_message or "").split())
    return f"{answer}: {reason}"[:MAX_ANSWER] if reason else answer


def is_unwritable(error: BaseException) -> bool:
    """Whether the cache lets nothing be written, which no moment changes."""
    is_read_only = isinstance(error, OSError) and error.errno == errno.EROFS
    return is_read_only or isinstance(error, PermissionError)


def _require_room(error: BaseException, what: str, arrivals: Arrivals) -> None:
    of_system = [cause.errno for cause in error_chain(error) if isinstance(cause, OSError)]
    full = any(number in (errno.ENOSPC, errno.EDQUOT) for number in of_system)
    if full or "No space left on device" in str(error):
        places = (arrivals.folders[0], *arrivals.folders[0].parents)
        folder = next(place for place in places if place.is_dir())
        free = shutil.disk_usage(folder).free
        raise DiskFailed(
            f"{what}: no room left in {folder}, {free} bytes are free. Remove something there, "
            "give spec.model.cache a larger volume, or raise the pods' limit of ephemeral-storage"
        ) from error


def _error_message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
