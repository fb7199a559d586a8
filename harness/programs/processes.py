"""Start daemons that can always be found again, and end them.

Every process of a cluster carries two variables in its environment: which cluster it belongs to and
its role. So `down` finds what is left after a crash in any other process, without pid files that
lie and without matching names.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .patience import LOOK_SECONDS, Patience

T = TypeVar("T")
MARK = "GRPO_TEST_CLUSTER"
ROLE = "GRPO_TEST_ROLE"
LOG_TAIL_LINES = 15
PROC = Path("/proc")
EXECUTING_SECONDS = 5
"""How long a process may take to load its program, until it counts as nobody's."""


class ClusterError(Exception):
    """Something of the test cluster failed; the message says what, and what to do about it."""


def run(*command: object, stdin: str | None = None) -> str:
    """Run a command to its end and return its output; raise ClusterError with its error text when
    it fails."""
    line = [str(part) for part in command]
    done = subprocess.run(line, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        detail = done.stderr.strip() or done.stdout.strip()
        raise ClusterError(f"`{' '.join(line)}` failed with exit code {done.returncode}: {detail}")
    return done.stdout


def until(what: str, probe: Callable[[], T], seconds: float = 60) -> T:
    """Call the probe until it returns something true and return that; an OSError counts as not yet.

    Raises ClusterError after `seconds` of idle time, with the last OSError's text.
    """
    patience = Patience(seconds)
    last = "no answer"
    while not patience.is_over:
        try:
            if result := probe():
                return result
            last = f"got {result!r}"
        except OSError as error:
            last = str(error)
        time.sleep(LOOK_SECONDS)
    raise ClusterError(f"waited {seconds:.0f} s for {what}: {last}")


@contextmanager
def server_process(
    name: str,
    command: Sequence[object],
    folder: Path,
    request: Request,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run a server while the block runs, which begins once it has answered the request; its log is
    in the folder.

    Raises:
        ClusterError: it ends, or doesn't answer.
    """
    log_file = folder / f"{name}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=log, stderr=log, env=environment, cwd=folder
        )

    def has_answered() -> bool:
        if process.poll() is not None:
            end = log_file.read_text(errors="replace")[-500:]
            raise ClusterError(f"{name} ended with exit code {process.returncode}: {end}")
        try:
            urlopen(request, timeout=10).close()
        except HTTPError as error:
            error.close()
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise
        return True  # a refusal is an answer

    try:
        until(f"{name} at {request.full_url}", has_answered)
        yield
    finally:
        process.kill()
        process.wait()


def flags(values: Mapping[str, object]) -> list[object]:
    """Return the words of a command line for options that have a value each."""
    return list(chain.from_iterable(values.items()))


class Processes:
    """The processes of one cluster, whose state lies in `directory`.

    `path` is put in front of PATH for every process, as daemons start others by name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = ""
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, role: str) -> dict[str, str]:
        """Return the environment of a process with this role."""
        search = os.pathsep.join(filter(None, (self.path, os.environ.get("PATH", os.defpath))))
        return {**os.environ, "PATH": search, MARK: str(self.directory), ROLE: role}

    def start(
        self, role: str, command: list[object], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a daemon in a session of its own (Ctrl-C does not reach it) that logs to
        `<role>.log`."""
        with self.log(role).open("ab") as log:
            child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(role),
                cwd=cwd or self.directory,
                start_new_session=True,
            )
        self._children[role] = child
        return child

    def log(self, role: str) -> Path:
        """Return the log file of a role such as `apiserver` or `node-0/kubelet`."""
        return self.directory / f"{role}.log"

    def check(self, role: str) -> None:
        """Raise ClusterError with the end of its log if the process that this object started has
        died."""
        child = self._children.get(role)
        if child is None or child.poll() is None:
            return
        tail = self.log(role).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise ClusterError(
            f"{role} ended with exit code {child.returncode}; its log ends:\n" + "\n".join(tail)
        )

    def find(self, role: str | None = None) -> list[int]:
        """Return the pids of this cluster (of one role) from any starter, without the calling
        process."""
        marks = {f"{MARK}={self.directory}".encode()}
        if role:
            marks.add(f"{ROLE}={role}".encode())
        return [
            pid for pid, variables in _environments() if marks <= variables and pid != os.getpid()
        ]

    def kill(self, role: str | None = None, seconds: float = 30) -> None:
        """SIGKILL the processes of this cluster (of one role) until none is left."""

        def none_left() -> bool:
            for pid in self.find(role):
                _kill(pid)
            self._reap()
            # a process that ends has no environment to be found by any more, and may still hold its
            # ports
            return not self.find(role) and not (
                self._children if role is None else {role} & self._children.keys()
            )

        until(f"the end of {role or 'all'} processes of {self.directory}", none_left, seconds)

    def _reap(self) -> None:
        self._children = {
            role: child for role, child in self._children.items() if child.poll() is None
        }


def _environments() -> Iterator[tuple[int, set[bytes]]]:
    for entry in PROC.glob("[0-9]*"):
        try:
            yield int(entry.name), set(_environment(entry).split(b"\0"))
        except OSError:  # ended meanwhile, or another user's: neither can be ours
            continue


def _environment(process: Path) -> bytes:
    """Read the environment of the process with this folder of /proc, once it has one."""
    file = process / "environ"
    if environment := file.read_bytes():
        return environment
    if _is_executing(process):
        patience = Patience(EXECUTING_SECONDS)
        while _is_executing(process) and not patience.is_over:
            time.sleep(LOOK_SECONDS)
    return file.read_bytes()


def _is_executing(process: Path) -> bool:
    """Return True in the midst of execve(2), of the process with this folder of /proc.

    It has memory, but neither arguments nor environment yet. The kernel has closed the old
    program's files by then: a guard that is woken by that overlooked the last process that its
    dying owner started.
    """
    if (process / "cmdline").read_bytes():
        return False
    # Kernel threads and what has ended have no arguments, and no memory either.
    return not (process / "statm").read_text().startswith("0 ")


def marked() -> Mapping[int, str]:
    """Return pid → state folder of every process of any cluster on this machine."""
    prefix = f"{MARK}=".encode()
    return {
        pid: variable[len(prefix) :].decode()
        for pid, variables in _environments()
        for variable in variables
        if variable.startswith(prefix)
    }


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended between being found and being killed
        return
