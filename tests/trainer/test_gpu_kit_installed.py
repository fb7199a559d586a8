"""The GPU kit as its user meets it: one command on a machine that has torch and transformers, and
no network."""

import json
import subprocess
from pathlib import Path

import pytest

from grpo_acceptance.findings import CHECKS, ENGINES
from tools.gpu import bare_machine

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

CARRIED = (
    "aiohttp",
    "datasets",
    "deepspeed",
    "grpo_trainer",
    "httpx2",
    "obstore",
    "peft",
    "pydantic",
    "trl",
)
ON_A_LOADED_MACHINE = ("--budget", "3600")
"""The default budget is that of a lent GPU."""


def installed(machine: Path, modules: tuple[str, ...]) -> list[str]:
    """The modules that the machine has."""
    code = (
        f"from importlib.util import find_spec; print(*[name for name in {modules} if "
        "find_spec(name)])"
    )
    return subprocess.run(
        [machine, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_kit_shows_on_a_bare_machine_all_that_a_cpu_can_show(tmp_path: Path) -> None:
    python = bare_machine.find_python()
    machine = bare_machine.create(tmp_path / "machine", python)
    assert installed(machine, ("torch", "transformers", "pip", *CARRIED)) == [
        "torch",
        "transformers",
        "pip",
    ]

    kit = bare_machine.packed_kit(bare_machine.version_of(python))
    options = ("--device", "cpu", "--ranks", "2", *ON_A_LOADED_MACHINE)
    done = bare_machine.run_kit(machine, kit, tmp_path / "out", *options)

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["versions"]["torch"].startswith(bare_machine.TORCH)
    assert [check["check"] for check in result["checks"]] == [check.name for check in CHECKS]
    states = {
        check["check"]: {finding["state"] for finding in check["findings"]}
        for check in result["checks"]
    }
    unseen = {name for name, found in states.items() if found != {"passed"}}
    assert unseen == {
        *(f"engine-{number + 1}" for number in range(ENGINES)),
        "engine-ranks",
        "engine-shared",
        *(check.name for check in CHECKS if check.needs_gpu),
    }
    assert all(states[name] == {"not run"} for name in unseen)
    assert installed(machine, CARRIED) == [], "the kit changes nothing on the machine"
