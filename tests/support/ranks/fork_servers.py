"""Fork servers for launch.py: multiprocessing's own, one for each set of packages that a process
may see.

A server has one thread and has run no operator of torch. A process that was forked from one asks
the same server for its own, since it sees the same packages.
"""

import os
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.images.vllm_packages import engine_environment

ROOT = Path(__file__).resolve().parents[3]
ISOLATED = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "operator", "trainer_image")),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every process runs with, whatever the caller's environment is."""
TRACER = "COVERAGE_PROCESS_CONFIG"
"""Variable by which coverage (`patch = subprocess` in pyproject.toml) hands its settings to child
processes."""
SPARE_TRACER = f"SPARE_{TRACER}"
"""Where tests/trainer/conftest.py puts it, so that no process is traced unless it is asked for."""

LIBRARIES = [
    "pytest",
    "grpo_trainer.training.worker",
    "grpo_trainer.training.training_run",
    "deepspeed",
    "transformers.models.qwen2.modeling_qwen2",
    "math_verify",
]
ENGINE_LIBRARIES = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "grpo_trainer.engine_pod.sampler",
    "tests.support.ranks.forked_vllm",
]
"""What an engine and its processes import beyond."""

_one_at_a_time = threading.Lock()
_inherited: list[ForkServer] = []
"""The server that this process was forked from."""


def start(process: BaseProcess, environment: Mapping[str, str]) -> None:
    """Start a process of multiprocessing from the server that sees what this environment's paths
    have."""
    server = _inherited[0] if _inherited else _server(vllm_folder(environment))
    with _one_at_a_time:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = server.connect_to_new_process
        try:
            process.start()
        finally:
            forkserver.connect_to_new_process = usual


def inherit() -> None:
    """Called in a forked process: what it starts comes from the same server."""
    server = forkserver._forkserver  # has the server's address already
    server.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    _inherited.append(server)


def vllm_folder(environment: Mapping[str, str]) -> str | None:
    """The folder of vLLM's packages among an environment's; None where it has none."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return next((folder for folder in folders if folder and Path(folder, "vllm").is_dir()), None)


def set_environment(values: Mapping[str, str]) -> None:
    """Replace this process's environment."""
    variables = dict(values)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # it was looked up in the old one


@cache
def _server(vllm: str | None) -> ForkServer:
    """Ends with this process."""
    made = ForkServer()
    made.set_forkserver_preload([*LIBRARIES, *(ENGINE_LIBRARIES if vllm else [])])
    before = dict(os.environ)
    set_environment(untraced() | isolated(vllm))
    try:
        made.ensure_running()
    finally:
        set_environment(before)
    return made


def isolated(vllm: str | None) -> dict[str, str]:
    """ISOLATED; with vLLM from this folder."""
    if vllm is None:
        return ISOLATED
    return (
        ISOLATED
        | engine_environment(vllm)
        | {"PYTHONPATH": os.pathsep.join((ISOLATED["PYTHONPATH"], vllm))}
    )


def untraced() -> dict[str, str]:
    """The caller's environment without what starts coverage's tracer."""
    return {name: value for name, value in os.environ.items() if name not in (TRACER, SPARE_TRACER)}
