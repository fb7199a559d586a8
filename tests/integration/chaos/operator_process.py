"""The operator as a process of its own, so that it can be killed at any moment and its log be searched."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.controlplane import free_port
from harness.programs.processes import until

from . import hasty_operator

ROOT = Path(__file__).parents[3]
START_SECONDS = 120.0
END_SECONDS = 60.0
OPTIONS = (
    "--trainer-image=example/trainer:1",
    "--metrics-address=127.0.0.1",
    "--resync-seconds=20",
    "--progress-seconds=2",
)


class OperatorProcess:
    """One operator after the other, all with one log."""

    def __init__(self, kubeconfig: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Nothing runs yet. By the environment the cluster knows the process as one of its own, and ends it too."""
        self._environment = environment
        self._command = [sys.executable, "-m", hasty_operator.__name__, f"--kubeconfig={kubeconfig}", *OPTIONS]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self.unexpected: list[str] = []
        """What the process did that nobody had told it to."""

    def start(self) -> None:
        """Starts a process; `wait_ready` waits until it works."""
        self._port = free_port()
        # a process that is killed in the middle of writing its coverage leaves a file that can't be read
        environment = {name: value for name, value in self._environment.items() if not name.startswith("COV")}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "operator"), str(ROOT)))
        with self._log.open("ab") as log:
            command = [*self._command, f"--metrics-port={self._port}"]
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        """Waits until it works; one that ends meanwhile is written down and started again."""

        def ready() -> bool:
            self.revive()
            return self.page("readyz")[0] == 200

        until("the operator to be ready", ready, START_SECONDS)

    def revive(self) -> None:
        """Starts it again if it ended without being told to, as the kubelet would."""
        if self._process is not None and (code := self._process.poll()) is not None:
            tail = self._log.read_text(errors="replace").splitlines()[-5:]
            self.unexpected.append(f"the operator ended by itself with exit code {code}: {tail}")
            self.start()

    def kill(self) -> None:
        """SIGKILL, and nothing is started in its place."""
        self._end(signal.SIGKILL, -signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and nothing is started in its place. A process that has not come up yet has no handler for it."""
        self._end(signal.SIGTERM, 0, -signal.SIGTERM if self.page("healthz")[0] == 0 else 0)

    def _end(self, number: signal.Signals, *expected: int) -> None:
        if self._process is None:
            return
        self.revive()
        process, self._process = self._process, None
        begun = time.monotonic()
        process.send_signal(number)
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.unexpected.append(f"the operator was still there {END_SECONDS:.0f} s after {number.name}")
            return
        if code not in expected:
            self.unexpected.append(f"{time.monotonic() - begun:.1f} s after {number.name} it ended with code {code}")

    @property
    def up(self) -> bool:
        """Whether a process is meant to run."""
        return self._process is not None

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of /healthz, /readyz or /metrics; status 0 while nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{name}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def complaints(self) -> Iterator[str]:
        """Lines of the log that no operator should write: errors, tracebacks, and what isn't a log line at all.

        What kopf asks again it tells as an error, too: after one of the API server, that is ours, and where it was told
        to end while it began.
        """
        if not self._log.exists():
            return
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                yield line
                continue
            told = fields.get("message", "")
            again = fields.get("logger", "").startswith("kopf.") and ("will retry" in told or "will re-auth" in told)
            if "traceback" in fields or (fields.get("level") in ("error", "critical") and not again):
                yield line
