"""Starts `python -m MODULE` for tests: truly, or forked from a server that has imported the training libraries.

A rank spends more time on importing torch, TRL and DeepSpeed than a test on all that it measures. The server is
multiprocessing's own, has one thread and has run no operator of torch; a forked process runs the module as `__main__`,
with its own arguments, environment and output, and differs from a true one in nothing that the trainer looks at.
`fresh=True` is the true command: for what must see the start itself, or the allocator's settings.

Coverage's tracer takes a fifth of a rank's time, so a process runs without it unless it is asked for: one gang per
reference strategy is `traced`, which shows the lines that the others run too.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
ISOLATED = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "operator", "trainer_image")),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every process runs with, whatever the caller's environment is."""
TRACER = "COVERAGE_PROCESS_CONFIG"
"""Variable by which coverage (`patch = subprocess` in pyproject.toml) hands its settings to child processes."""
SPARE_TRACER = f"SPARE_{TRACER}"
"""Where tests/trainer/conftest.py puts it, so that no process is traced unless it is asked for."""
LIBRARIES = [
    "pytest",
    "grpo_trainer.worker",
    "grpo_trainer.training",
    "deepspeed",
    "transformers.models.qwen2.modeling_qwen2",
    "math_verify",
]


class Launched(Protocol):
    """What subprocess.Popen and Forked have in common."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Exit code once it was polled or waited for; negative after a signal."""

    def poll(self) -> int | None:
        """Exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once there is one."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""

    def kill(self) -> None:
        """SIGKILL."""


def launch(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    output: Path,
    *,
    fresh: bool = False,
    traced: bool = False,
) -> Launched:
    """Run a module; `environment` is added to the caller's and to ISOLATED. `traced`: under the caller's coverage."""
    full = untraced() | ISOLATED | environment | (tracer() if traced else {})
    output.touch()
    if not fresh:
        return Forked(module, arguments, full, output)
    with output.open("wb") as file:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, env=full, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


class Forked:
    """A process forked from the server."""

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str], output: Path) -> None:
        process = server().Process(target=_run, args=(module, arguments, environment, str(output)))
        process.start()
        assert process.pid is not None
        self._process: BaseProcess = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same, as Popen calls it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once there is one."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


@cache
def server() -> ForkServerContext:
    """The fork server; ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    before = dict(os.environ)
    set_environment(untraced() | ISOLATED)
    try:
        forkserver.ensure_running()
    finally:
        set_environment(before)
    return context


def tracer() -> dict[str, str]:
    """What starts coverage's tracer in a process; nothing where the caller's coverage isn't measured."""
    return {TRACER: os.environ[SPARE_TRACER]} if SPARE_TRACER in os.environ else {}


def untraced() -> dict[str, str]:
    """The caller's environment without what starts coverage's tracer."""
    return {name: value for name, value in os.environ.items() if name not in (TRACER, SPARE_TRACER)}


def set_environment(values: dict[str, str]) -> None:
    """Replace this process's environment."""
    os.environ.clear()
    os.environ.update(values)


def trace() -> None:
    """Start coverage if the environment asks for it: Python does so at its start, which a forked process never sees.

    `patch = _exit` in pyproject.toml saves what was traced when the module leaves. Its own children are not traced:
    those of reward functions end by SIGKILL, in the middle of what coverage writes.
    """
    if TRACER in os.environ:
        import coverage

        coverage.process_startup()
        del os.environ[TRACER]


def _run(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """In the forked process: what the interpreter does for `-m`."""
    gc.freeze()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    set_environment(environment)
    sys.argv[1:] = arguments
    trace()
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
