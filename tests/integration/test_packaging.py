"""The wheel: it installs in a clean environment, brings the CLI and the planner, and shadows
nothing.

An editable install hides what a wheel lacks: data files, packages, entry points.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.release import python_package

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
HEAVY = {"torch", "transformers", "kopf", "kubernetes", "aiohttp"}


def run(*command: object, folder: Path) -> str:
    """What the command prints; sources that the caller's PYTHONPATH names would stand in for the
    wheel."""
    line = [str(part) for part in command]
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        line, cwd=folder, env=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as a release has it."""
    folder = tmp_path_factory.mktemp("wheel")
    return python_package.build_wheel(
        python_package.copied(folder / "source"), folder, epoch=1_700_000_000
    )


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    run(UV, "venv", "--python", sys.executable, folder / "venv", folder=folder)
    python = folder / "venv/bin/python"
    run(
        UV,
        "pip",
        "install",
        "--python",
        python,
        "--constraint",
        ROOT / "constraints.txt",
        wheel,
        folder=folder,
    )
    return folder / "venv/bin"


def test_the_wheel_holds_our_packages_and_nothing_called_operator(wheel: Path) -> None:
    inside = {
        name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name
    }
    assert inside == {
        "grpo",
        "grpo_kube",
        "grpo_api",
        "grpo_planner",
        "grpo_operator",
        "grpo_cli",
        "grpo_trainer",
        "grpo_acceptance",
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {"grpo_planner/model/catalogue.yaml", "grpo_planner/hardware/products.yaml"} <= set(
        names
    )


def test_the_base_install_is_light(clean: Path) -> None:
    listed = run(UV, "pip", "list", "--python", clean / "python", folder=clean)
    installed = {line.split()[0] for line in listed.splitlines()[2:]}
    assert "grpo-operator" in installed
    assert not installed & HEAVY
    assert len(installed) < 20, "pydantic, PyYAML, rich, prometheus-client and what they need"


@pytest.mark.parametrize("program", ["grpo", "kubectl-grpo"])
def test_the_command_line_is_there(clean: Path, program: str) -> None:
    shown = run(clean / program, "--help", folder=clean)
    for command in ("plan", "render", "status", "logs"):
        assert f"    {command} " in shown


def test_a_job_is_planned_without_a_cluster(clean: Path) -> None:
    example = ROOT / "examples/01-first-job.yaml"
    shown = run(clean / "grpo", "plan", "--filename", example, folder=clean)
    assert "Clone" in shown
    assert "Job" in run(clean / "grpo", "render", "--filename", example, folder=clean)


def test_the_standard_librarys_operator_stays(clean: Path) -> None:
    code = "import grpo_cli, operator; print(operator.itemgetter(1)('ab'), operator.__file__)"
    value, place = run(clean / "python", "-c", code, folder=clean).split()
    assert value == "b"
    assert "site-packages" not in place
