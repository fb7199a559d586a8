"""A pytest plugin that refuses the real world to every test without the mark `realtime`.

Such a test fails when it starts a process, connects or binds a socket, or sleeps: on a loaded
machine each of these takes any time, and a test that depends on it fails by chance. Threads that a
test starts count as the test.

Python can't remove an audit hook, so one hook per process looks up which test runs. Teardown is
free, since it ends what a wider fixture has started for other tests. So is what a module does while
it is imported: it does it for whichever test comes first, or for none where a cache is warm.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, SupportsIndex
from weakref import WeakKeyDictionary

import pytest

ADVICE = (
    "inject the clock or the transport, run it in tests/virtual_time.py, or mark it "
    "`@pytest.mark.realtime`"
)
PURE_FOLDER = "tests/unit/"
"""Its unmarked tests don't load torch either, which takes seconds of each process."""
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
"""The file that Python names in the frames that run a module."""
ACTIONS = {
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.exec": "starts a process",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "socket.connect": "connects a socket",
    "socket.bind": "binds a socket",
}


class Refusals:
    """The unmarked test that runs in this process, and what it was refused."""

    def __init__(self) -> None:
        self.test = ""
        self.refused: list[str] = []
        # Tests are told apart by thread: a cluster's thread that an earlier test started is not the
        # current test.
        self._test_of_thread: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()

    @contextmanager
    def running(self, test: str) -> Iterator[None]:
        """Refuse the real world to the test until the block ends; an empty name refuses nothing."""
        outer = self.test, self.refused
        self.test, self.refused = test, []
        try:
            yield
            if self.refused:
                # Raised again in case that the product caught it, or that it ended a thread only.
                pytest.fail(self.refused[0], pytrace=False)
        finally:
            self.test, self.refused = outer

    def inherit(self, thread: threading.Thread) -> None:
        """Let a new thread count as the test of the thread that starts it."""
        self._test_of_thread[thread] = self._current_test()

    def refuse(self, action: str) -> None:
        """Fail the test that does this, unless it is marked or no test does it."""
        test = self._current_test()
        if test:
            message = f"{test} {action}, but is not marked realtime: {ADVICE}"
            if test == self.test:  # a thread may outlive its test
                self.refused.append(message)
            pytest.fail(message)

    def _current_test(self) -> str:
        thread = threading.current_thread()
        if thread is threading.main_thread():
            return self.test
        return self._test_of_thread.get(thread, "")


REFUSALS = Refusals()
_really_sleep = time.sleep
_really_start = threading.Thread.start


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ACTIONS:
        if not _is_importing():
            REFUSALS.refuse(ACTIONS[event])
    elif event == "import" and arguments[0] == "torch" and REFUSALS.test.startswith(PURE_FOLDER):
        REFUSALS.refuse("imports torch")


def _is_importing() -> bool:
    """Return True while this thread runs a module for the first time.

    urllib3 binds a socket then, and matplotlib starts a process where it knows no fonts yet.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != IMPORT_SYSTEM:
        frame = frame.f_back
    return frame is not None


def _start(self: threading.Thread) -> None:
    REFUSALS.inherit(self)
    _really_start(self)


def _sleep(seconds: float | SupportsIndex) -> None:
    if float(seconds) > 0:  # 0 lets other threads run and waits for nothing
        REFUSALS.refuse(f"sleeps for {float(seconds):g} s")
    _really_sleep(seconds)


def install() -> None:
    """Watch this process from now on; call it once, before test modules are imported."""
    sys.addaudithook(_audit)
    time.sleep = _sleep
    threading.Thread.start = _start  # type: ignore[method-assign]  # an audit event only since Python 3.12


def _name_of(item: pytest.Item) -> str:
    return "" if item.get_closest_marker("realtime") else item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Refuse it to fixtures."""
    with REFUSALS.running(_name_of(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Refuse it to the test's body."""
    with REFUSALS.running(_name_of(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Allow it to the end of fixtures."""
    with REFUSALS.running(""):
        return (yield)


install()
