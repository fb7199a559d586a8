"""Native code that a GPU run loads or compiles late, loaded and compiled here, with CUDA's own
libraries.

In the built image, as a pod, the same script runs in tests/e2e/test_image.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_planner.hardware.products import IMAGE
from grpo_trainer.process.process_setup import threads_per_process
from harness.images import image_checks, native_parts
from harness.images.wheels import pinned
from tests.support.ranks.fork_servers import ISOLATED
from tests.support.ranks.gang import run_gang

pytestmark = pytest.mark.realtime


def test_plans_are_made_for_the_gpus_that_the_pinned_torch_is_built_for() -> None:
    built = [flag.removeprefix("sm_") for flag in (torch._C._cuda_getArchFlags() or "").split()]
    assert [(int(flag[:-1]), int(flag[-1])) for flag in built] == list(IMAGE)


@pytest.mark.slow
def test_what_a_gpu_run_loads_late_is_there(tmp_path: Path) -> None:
    command, environment = (
        [sys.executable, native_parts.__file__],
        {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {"launch", "load_binary"} <= set(found["driver"])
    assert list(found["kernels"]) == [f"{major}{minor}" for major, minor in IMAGE]
    assert all(size > 4096 for kernels in found["kernels"].values() for size in kernels.values())
    assert found["bitsandbytes"] == ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"]
    assert found["deepspeed"] == "cuda"
    assert found["nccl"] == pinned("nvidia-nccl-cu13")
    assert list(tmp_path.rglob("cuda_utils*.so")), "Triton keeps what it compiled in the home"


@pytest.mark.slow
def test_libraries_resolve_modules_import_and_kernels_compile(tmp_path: Path) -> None:
    command = [sys.executable, image_checks.__file__, "80", "90", "100"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **ISOLATED}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["libraries"]["torch"] > 5
    assert found["libraries"]["nvidia/nccl"] > 0
    assert found["unresolved"] == {}
    assert set(found["failures"].values()) == {"ModuleNotFoundError: No module named 'vllm'"}
    assert found["inductor"] is True
    assert found["kernels"].keys() == {"80", "90", "100"}
    assert all(size > 1000 for sizes in found["kernels"].values() for size in sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_an_optimizer_in_host_memory_needs_no_compiler(zero: int, tmp_path: Path) -> None:
    (facts,) = run_gang("tests.support.facts.offload_facts:offloaded", tmp_path, 1, zero=zero)
    assert facts == {"optimizer": "torch.optim.adamw", "steps": 6, "compiled": []}


@pytest.mark.parametrize(
    ("limit", "processes", "threads"),
    [
        ("max 100000", 1, 8),
        ("max 100000", 3, 2),
        ("400000 100000", 2, 2),
        ("50000 100000", 1, 1),
        ("max 1", 99, 1),
        ("", 4, 2),
    ],
)
def test_cores_are_shared_out(
    limit: str, processes: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    if limit:
        file.write_text(f"{limit}\n")
    assert threads_per_process(processes, file) == threads
