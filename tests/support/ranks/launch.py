"""Starts `python -m MODULE` for tests: truly, or forked from a server that has imported the
training libraries.

A rank spends more time on importing torch, TRL and DeepSpeed than a test on all that it measures.
The server is multiprocessing's own, has one thread and has run no operator of torch; a forked
process runs the module as `__main__`, with its own arguments, environment and output, and differs
from a true one in nothing that the trainer looks at. `fresh=True` is the true command: for what
must see the start itself, or the allocator's settings. Where the caller sees vLLM, so do the
processes that it starts, and the server has imported that too (fork_servers.py).

Coverage's tracer takes a fifth of a rank's time, so a process runs without it unless it is asked
for: one gang per reference strategy is `traced`, which shows the lines that the others run too, and
so is what runs vLLM.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from . import fork_servers
from .fork_servers import (
    ISOLATED,
    ROOT,
    SPARE_TRACER,
    TRACER,
    isolated,
    set_environment,
    untraced,
    vllm_folder,
)

__all__ = ["ISOLATED", "SPARE_TRACER", "TRACER", "Forked", "Launched", "launch", "tracer"]


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


UNCHECKED = """
import sys, types
unchecked = types.ModuleType("grpo_trainer.preflight.rank0")
unchecked.require_passed = lambda plan, is_supervisor: None
sys.modules["grpo_trainer.preflight.rank0"] = unchecked
"""
"""Takes the place of rank 0's checks, as part of a sitecustomize.py, where a plan names what does
not exist."""


def launch(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    output: Path,
    *,
    fresh: bool = False,
    traced: bool = False,
) -> Launched:
    """Run a module; `environment` is added to the caller's and to ISOLATED. `traced`: under the
    caller's coverage."""
    full = (
        untraced() | isolated(vllm_folder(os.environ)) | environment | (tracer() if traced else {})
    )
    output.touch()
    if not fresh:
        return Forked(module, arguments, full, output)
    with output.open("wb") as file:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, env=full, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


class Forked:
    """A process forked from the server."""

    def __init__(
        self, module: str, arguments: list[str], environment: dict[str, str], output: Path
    ) -> None:
        process = ForkServerContext().Process(
            target=_run, args=(module, arguments, environment, str(output))
        )
        fork_servers.start(process, environment)
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


def tracer() -> dict[str, str]:
    """What starts coverage's tracer in a process; nothing where the caller's coverage isn't
    measured."""
    return {TRACER: os.environ[SPARE_TRACER]} if SPARE_TRACER in os.environ else {}


def trace() -> None:
    """Start coverage if the environment asks for it: Python does so at its start, which a forked
    process never sees.

    `patch = _exit` in pyproject.toml saves what was traced when the module leaves. Its own children
    are not traced, unless it launches them so: those of reward functions end by SIGKILL, in the
    middle of what coverage writes.
    """
    if TRACER in os.environ:
        import coverage

        coverage.process_startup()
        os.environ[SPARE_TRACER] = os.environ.pop(TRACER)


def customize(folders: list[str]) -> None:
    """Run the first sitecustomize.py: Python does so at its start, which a forked process never
    sees."""
    files = [Path(folder) / "sitecustomize.py" for folder in folders]
    for file in [file for file in files if file.exists()][:1]:
        runpy.run_path(str(file))


def _run(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """In the forked process: what the interpreter does for `-m`."""
    gc.freeze()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    set_environment(environment)
    folders = environment["PYTHONPATH"].split(os.pathsep)
    sys.path += [folder for folder in folders if folder not in sys.path]
    fork_servers.inherit()
    sys.argv[1:] = arguments
    customize(folders)
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
