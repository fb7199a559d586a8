"""Starts a scenario on several ranks of this machine, as separate processes that meet on a loopback
port.

Facts about several ranks are thus seen on real process groups. Started as `python -m
tests.support.ranks.gang MODULE:FUNCTION FOLDER ARGUMENTS` it is one rank: it joins, calls the
function and leaves what that returns as JSON in FOLDER.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness.controlplane import free_port
from harness.programs.patience import Patience

from .launch import Launched, launch

TIMEOUT_SECONDS = 1800


def run_gang(
    scenario: str, folder: Path, world_size: int = 2, *, fresh: bool = False, **arguments: Any
) -> list[dict[str, Any]]:
    """Results of `module:function(folder, **arguments)` by rank; `fresh` as in launch.py.

    Raises:
        AssertionError: a rank failed; with the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [scenario, str(folder), json.dumps(arguments)]
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(free_port())
    places = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    processes = [
        launch("tests.support.ranks.gang", command, place, _output(folder, rank), fresh=fresh)
        for rank, place in enumerate(places)
    ]
    try:
        codes = _codes(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, code in enumerate(codes):
        assert code in (0, None), (
            f"rank {rank} exited with {code}:\n{_output(folder, rank).read_text()[-6000:]}"
        )
    assert None not in codes, (
        f"still running after {TIMEOUT_SECONDS} s:\n{_output(folder, 0).read_text()[-6000:]}"
    )
    return [json.loads(_result(folder, rank).read_text()) for rank in range(world_size)]


def _codes(processes: list[Launched]) -> list[int | None]:
    """Exit codes once all ended or one failed; None for those that still run."""
    patience = Patience(TIMEOUT_SECONDS)
    while not patience.is_over:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return codes
        time.sleep(0.05)
    return [process.poll() for process in processes]


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def main() -> None:
    """One rank. Leaves without the interpreter's teardown: DeepSpeed can abort there after
    success."""
    import torch

    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    module, function = sys.argv[1].split(":")
    folder = Path(sys.argv[2])
    result = getattr(importlib.import_module(module), function)(folder, **json.loads(sys.argv[3]))
    _result(folder, int(os.environ["RANK"])).write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
