"""Runs the checks, each in processes of its own, under one budget of time.

A CUDA error, an abort or a hang thus ends one check, and the report has its exit code. While one
check runs, the processes of the next ones import their libraries and wait for the start: the
imports take longer than most checks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpo_api.text.contract import ALLOCATOR_ENV, EXPANDABLE_SEGMENTS
from grpo_trainer.runtime.clock import SYSTEM_CLOCK

from .findings import Check, Context, Finding, load_findings, make_finding, skipped_finding

LEAST_SECONDS = 15.0
"""With less time left no check is begun."""
POLL_SECONDS = 0.05
CORES_OF_IMPORT = 4
"""Cores for each process that imports beside a check."""
DEATH_SECONDS = 5.0
"""Longest wait for a killed process: one that hangs in a GPU's driver can't die."""
WORD = b"go\n"
TAIL = 20_000
"""Bytes of a process's output that are kept."""
SETTINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check that has ended, or was not begun."""

    name: str
    findings: list[Finding]
    seconds: float = 0.0
    log: str = ""
    """End of the output of its processes."""


class CheckProcess:
    """The processes of one check, waiting for the word. A context manager that leaves none
    behind."""

    def __init__(self, check: Check, context: Context) -> None:
        self.check = check
        self._outputs = [context.path / f"{check.name}-{rank}.out" for rank in range(context.world)]
        self._answer = answer_file(check, context)
        port = free_port()
        self._processes = [
            self._start(replace(context, rank=rank, port=port)) for rank in range(context.world)
        ]

    def _start(self, context: Context) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __package__ or ""]
        command += ["--check", json.dumps(asdict(self.check))]
        command += ["--context", json.dumps(asdict(context))]
        with self._outputs[context.rank].open("wb") as output:
            # a session of its own: what a check starts is ended with it
            return subprocess.Popen(
                command,
                env=_allocator() | os.environ | SETTINGS | (NO_GPUS if self.check.on_cpu else {}),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, seconds: float, out_of_time: str) -> CheckResult:
        """Give the word and wait for at most so long; `out_of_time` says why not longer, empty for
        the check's own limit."""
        begin = SYSTEM_CLOCK.now()
        for process in self._processes:
            # It may have ended already, over an import, say; its exit code says so.
            with suppress(BrokenPipeError):
                os.write(process.stdin.fileno() if process.stdin else -1, WORD)
        codes = self._codes(begin + seconds)
        took = SYSTEM_CLOCK.now() - begin
        findings = self._findings(codes, took, out_of_time)
        return CheckResult(self.check.name, findings, round(took, 1), self._log())

    def _codes(self, deadline: float) -> list[int | None]:
        """Exit codes once all have ended, one has failed or time is up; None for those that still
        run."""
        while True:
            codes = [process.poll() for process in self._processes]
            if None not in codes or any(codes) or SYSTEM_CLOCK.now() >= deadline:
                return codes
            SYSTEM_CLOCK.sleep(POLL_SECONDS)

    def _findings(self, codes: list[int | None], took: float, out_of_time: str) -> list[Finding]:
        failed = [code for code in codes if code]
        if not failed and None in codes:
            if out_of_time:
                return [skipped_finding(self.check.name, out_of_time)]
            return [make_finding(self.check.name, [f"no answer within {took:.0f} s"], "")]
        if failed or not self._answer.exists():
            ended = f"ended with exit code {', '.join(map(str, failed)) or '0 without an answer'}"
            return [make_finding(self.check.name, [ended], _last_line(self._log()))]
        return load_findings(self._answer.read_text(encoding="utf-8"))

    def _log(self) -> str:
        return "".join(path.read_bytes()[-TAIL:].decode(errors="replace") for path in self._outputs)

    def __enter__(self) -> "CheckProcess":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(DEATH_SECONDS)
            if process.stdin:
                process.stdin.close()


def run_checks(
    checks: Sequence[Check],
    context: Context,
    deadline: float,
    on_begin: Callable[[Check, float], None] = lambda *_: None,
) -> Iterator[CheckResult]:
    """Run the checks in turn until the deadline on SYSTEM_CLOCK.

    `on_begin` is called with each check that is begun and the seconds after which it will be ended.
    """
    fit = (check for check in checks if not skip_message(check, context))
    importing: deque[CheckProcess] = deque()

    def import_next() -> None:
        check = next(fit, None)
        if check:
            importing.append(CheckProcess(check, _check_context(check, context)))

    try:
        import_next()
        for check in checks:
            seconds_left = deadline - SYSTEM_CLOCK.now()
            if why := skip_message(check, context) or (
                "time" if seconds_left < LEAST_SECONDS else ""
            ):
                yield CheckResult(check.name, [skipped_finding(check.name, why)])
                continue
            with importing.popleft() as current:
                for _ in range(processes_ahead() - len(importing)):
                    import_next()
                seconds = min(check.seconds, seconds_left)
                on_begin(check, seconds)
                yield current.run(seconds, "time" if seconds_left < check.seconds else "")
    finally:
        for process in importing:
            process.__exit__()


def processes_ahead() -> int:
    """Checks whose processes import their libraries while another check runs; each takes a few
    cores and about a gigabyte of host memory."""
    return max(1, min(3, (os.cpu_count() or 1) // CORES_OF_IMPORT))


def skip_message(check: Check, context: Context) -> str:
    """Why a check can't be run here; empty where it can. The context's world is the number of
    devices."""
    if check.needs_gpu and not context.is_gpu:
        return "needs a GPU"
    if check.ranks and context.world < 2:
        return "one rank can't show it"
    return ""


def answer_file(check: Check, context: Context) -> Path:
    """Where a check's first process leaves its findings."""
    return context.path / f"{check.name}.json"


def _check_context(check: Check, context: Context) -> Context:
    """The context of a check: one process, or one per device; on a CPU where that is its place."""
    placed = context if check.ranks else replace(context, world=1)
    return replace(placed, device="cpu") if check.on_cpu else placed


def _allocator() -> dict[str, str]:
    """The allocator's settings that a plan's memory is counted with, unless the environment has its
    own."""
    return {} if set(ALLOCATOR_ENV) & os.environ.keys() else {ALLOCATOR_ENV[0]: EXPANDABLE_SEGMENTS}


def _last_line(log: str) -> str:
    """The last line of an output that says something."""
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "it printed nothing"


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
