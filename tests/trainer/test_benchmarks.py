"""Every benchmark can be imported and explains its options; those of a few seconds run at their
smallest size."""

import importlib
import subprocess
import sys

import pytest

from benchmarks.__main__ import benchmarks
from harness.programs.cache import REPOSITORY
from tests.benchmark_sizes import IN_THE_GATE, SMALLEST


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_explains_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"python -m benchmarks {name}", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m benchmarks {name} " in shown
    assert all(option in shown for option in SMALLEST[name] if option.startswith("--"))


@pytest.mark.realtime
@pytest.mark.parametrize("name", [name for name in IN_THE_GATE if name != "plan_speed"])
def test_a_quick_benchmark_prints_its_table(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks", name, *SMALLEST[name]]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1
