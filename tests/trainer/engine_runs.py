"""Runs a module in a process of its own, with vLLM, which the test's process must not see: TRL
looks for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ranks.launch import launch

FACTS = "facts.json"
"""What a module leaves in its folder."""


def engine_run(
    module: str, folder: Path, vllm: Mapping[str, str], *arguments: str, **environment: str
) -> Any:
    """What `python -m MODULE FOLDER ARGUMENTS` left in facts.json.

    Args:
        module: below tests.trainer.
        folder: its own.
        vllm: environment of a process with vLLM, as the fixture `vllm_cpu` has it.
        arguments: after the folder.
        environment: more of it.

    Raises:
        AssertionError: it failed; with the end of what it printed.
    """
    log = folder / "log"
    own = {"HOME": str(folder), **vllm, **environment}
    process = launch(f"tests.trainer.{module}", [str(folder), *arguments], own, log, traced=True)
    try:
        code = process.wait()
    finally:
        process.kill()
    assert code == 0, log.read_text(errors="replace")[-6000:]
    return json.loads((folder / FACTS).read_text())
