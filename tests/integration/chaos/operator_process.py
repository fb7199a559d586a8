"""Two operators as processes of their own that lead by one Lease, so that each can be killed or
stopped at any moment.

Both logs are searched for what no operator should say.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.controlplane import free_port
from harness.programs.patience import wait_for_exit
from harness.programs.processes import until

from ..leader_bench import named, operator_page
from . import hasty_operator

ROOT = Path(__file__).parents[3]
START_SECONDS = 120.0
END_SECONDS = 60.0
PAGE_SECONDS = 5.0
NAMESPACE = "default"
"""Where the operators' Lease and account are."""
NAMES = ("operator-0", "operator-1")
LEASE_SECONDS = 5
"""Half of the default: each leader that is killed or stopped costs the storm so long."""
OPTIONS = (
    "--trainer-image=example/trainer:1",
    "--metrics-address=127.0.0.1",
    "--resync-seconds=20",
    "--progress-seconds=2",
    f"--leader-elect={NAMESPACE}/{named(NAMESPACE)}",
    "--fence",
    f"--lease-seconds={LEASE_SECONDS}",
)
LEADS = "grpo_operator_leader 1.0"


class OperatorProcess:
    """One replica: one process after the other, all with one log."""

    def __init__(
        self, name: str, kubeconfig: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        """Nothing runs yet. By the environment the cluster knows the process as one of its own, and
        ends it too."""
        self.name = name
        self._environment = {**environment, "POD_NAME": name}
        self._command = [
            sys.executable,
            "-m",
            hasty_operator.__name__,
            f"--kubeconfig={kubeconfig}",
            *OPTIONS,
        ]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self.stopped = False
        """Whether it stands still: sent SIGSTOP, and no SIGCONT since."""
        self.started_at = 0.0
        """Unix time of the newest start."""
        self.unexpected: list[str] = []
        """What the process did that nobody had told it to."""

    def start(self) -> None:
        """Starts a process."""
        self.started_at = time.time()
        self._port = free_port()
        # a process that is killed in the middle of writing its coverage leaves a file that can't be
        # read
        environment = {
            name: value for name, value in self._environment.items() if not name.startswith("COV")
        }
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "operator"), str(ROOT)))
        with self._log.open("ab") as log:
            command = [*self._command, f"--metrics-port={self._port}"]
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def revive(self) -> None:
        """Starts it again if it ended without being told to, as the kubelet would."""
        if self._process is not None and (code := self._process.poll()) is not None:
            # its Lease was not renewed in time, for some fault: what ends then begins again as a
            # follower
            if code != hasty_operator.LEASE_LOST:
                tail = self._log.read_text(errors="replace").splitlines()[-5:]
                self.unexpected.append(f"{self.name} ended by itself with exit code {code}: {tail}")
            self.start()

    def stop(self) -> None:
        """SIGSTOP: it stands still in the middle of what it does."""
        assert self._process
        self.stopped = True
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT to a process that stands still. Its Lease is another's by now: it must end by
        itself."""
        if not self.stopped:
            return
        assert self._process
        self.stopped = False
        self._process.send_signal(signal.SIGCONT)
        try:
            wait_for_exit(self._process, END_SECONDS)
        except subprocess.TimeoutExpired:
            self.unexpected.append(
                f"{self.name} was still there {END_SECONDS:.0f} s after it had lost its Lease"
            )
        self.revive()

    def kill(self) -> None:
        """SIGKILL, and nothing is started in its place."""
        self._end(signal.SIGKILL, -signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and nothing is started in its place. A process that has not come up yet has no
        handler for it."""
        self._end(signal.SIGTERM, 0, -signal.SIGTERM if self.page("healthz")[0] == 0 else 0)

    def _end(self, number: signal.Signals, *expected: int) -> None:
        if self._process is None:
            return
        self.revive()
        process, self._process, self.stopped = self._process, None, False
        begun = time.monotonic()
        process.send_signal(number)
        try:
            code = wait_for_exit(process, END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.unexpected.append(
                f"{self.name} was still there {END_SECONDS:.0f} s after {number.name}"
            )
            return
        # its Lease may have run out just then
        if code not in (*expected, hasty_operator.LEASE_LOST):
            self.unexpected.append(
                f"{time.monotonic() - begun:.1f} s after {number.name} {self.name} ended with "
                f"code {code}"
            )

    @property
    def up(self) -> bool:
        """Whether a process is meant to run."""
        return self._process is not None

    @property
    def leads(self) -> bool:
        """Whether it says that it leads; one that stands still says nothing."""
        return self.up and not self.stopped and LEADS in self.page("metrics")[1].splitlines()

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of /healthz, /readyz or /metrics; status 0 while nothing listens."""
        return operator_page(self._port, name, PAGE_SECONDS)

    def complaints(self) -> Iterator[str]:
        """Lines of the log that no operator should write: errors, tracebacks, and what isn't a log
        line at all.

        What kopf asks again it tells as an error, too: after one of the API server, that is ours,
        and where it was told to end while it began.
        """
        if not self._log.exists():
            return
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                yield line
                continue
            message = fields.get("message", "")
            again = fields.get("logger", "").startswith("kopf.") and (
                "will retry" in message or "will re-auth" in message
            )
            is_error = fields.get("level") in ("error", "critical")
            if "traceback" in fields or (is_error and not again):
                yield line


class Replicas:
    """Two operators and one Lease."""

    def __init__(
        self, kubeconfigs: Mapping[str, Path], folder: Path, environment: Mapping[str, str]
    ) -> None:
        """Nothing runs yet; each has a kubeconfig of its own, by its name."""
        self.all = tuple(
            OperatorProcess(name, kubeconfig, folder / f"{name}.log", environment)
            for name, kubeconfig in kubeconfigs.items()
        )

    def named(self, name: str) -> OperatorProcess:
        """The replica of that name."""
        return next(one for one in self.all if one.name == name)

    def leader(self) -> OperatorProcess | None:
        """The one that says that it leads."""
        return next((one for one in self.all if one.leads), None)

    def leader_or_any(self) -> OperatorProcess:
        """The one that leads; while nobody does, one that does not stand still."""
        return self.leader() or next(
            (one for one in self.all if one.up and not one.stopped), self.all[0]
        )

    @property
    def started_at(self) -> float:
        """Unix time of the newest start of any."""
        return max(one.started_at for one in self.all)

    def start(self) -> None:
        """Starts those that do not run."""
        for one in self.all:
            if not one.up:
                one.start()

    def wait_ready(self) -> None:
        """Waits until one leads; those that end meanwhile are started again."""

        def led() -> bool:
            self.revive()
            return self.leader() is not None

        until("an operator to lead", led, START_SECONDS)

    def revive(self) -> None:
        """Starts those again that ended without being told to."""
        for one in self.all:
            one.revive()

    def kill(self) -> None:
        """SIGKILL to all."""
        for one in self.all:
            one.kill()

    def terminate(self) -> None:
        """SIGTERM to all."""
        for one in self.all:
            one.terminate()

    def complaints(self) -> Iterator[str]:
        """What they did that nobody had told them to, and what no operator should log."""
        for one in self.all:
            yield from one.unexpected
            yield from (f"the log of {one.name}: {line}" for line in one.complaints())
