"""What `make demo` prints fits 80 columns; `make demo CONTEXT=…` needs nothing installed and says
what is missing.

e2e/test_quickstart.py runs the second one whole.
"""

import ast
import io
import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from examples.demo import __main__ as demo
from examples.demo import anywhere
from examples.demo.__main__ import Demo, read_example, show_job
from examples.demo.anywhere import DemoError, settings_of, sibling
from examples.demo.follow import COLUMNS, History, follow, live_view, status_line
from grpo_cli.commands import run

NAMES = st.from_regex(r"([a-z0-9.]{1,9}(:[0-9]{2,5})?/)?([a-z0-9]{1,9}/){0,2}", fullmatch=True)
STATUS = {
    "phase": "Running",
    "restarts": 0,
    "plan": {"parameters": "77K", "strategy": "Clone"},
    "pods": [
        {
            "name": f"first-job-1-{index}-x7k2p",
            "index": index,
            "node": f"node-{index}",
            "phase": "Running",
        }
        for index in range(2)
    ],
    "progress": {"step": 42, "totalSteps": 100, "summary": "42/100"},
    "metrics": {"kl": "0.02134", "reward": "0.6406"},
}
"""A job's status in the middle of the demo."""
ENDED: dict[str, Any] = {"conditions": [{"type": "Failed", "status": "True"}], "phase": "Failed"}
WIDTH = 80
TAGS = st.from_regex(r"[A-Za-z0-9_][-A-Za-z0-9_.]{0,9}", fullmatch=True)


def job(name: str = "first-job", **status: Any) -> dict[str, Any]:
    """A GRPOJob in the middle of the demo, but for these parts of its status."""
    return {"metadata": {"name": name, "namespace": "first-job"}, "status": STATUS | status}


def screen(shown: dict[str, Any]) -> list[str]:
    """The lines of the live view on a terminal of 80 columns."""
    output = io.StringIO()
    console = Console(
        width=WIDTH, file=output, force_terminal=True, color_system=None, highlight=False
    )
    console.print(live_view(shown, 123.4))
    return output.getvalue().splitlines()


def test_without_namespaces_the_example_runs_as_processes_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "real nodes need namespaces, and this machine refuses them (unshare: no)"
    commands: list[list[str]] = []

    def grpo(command: list[str]) -> int:
        commands.append(command)
        return 3

    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(demo, "refused_namespaces_message", lambda: refused)
    monkeypatch.setattr(demo, "fill_volume", lambda _: None)
    monkeypatch.setattr(demo, "grpo", grpo)
    assert demo.main() == 3, "the trainer's exit code"
    ((verb, *flags),) = commands
    options = run_command_options(flags)
    assert (verb, options.local, options.filename) == ("run", True, str(demo.EXAMPLE))
    claim, _, folder = options.volume[0].partition("=")
    assert read_example()["spec"]["model"]["volume"]["claimName"] == claim
    assert Path(folder).is_dir()


def run_command_options(flags: list[str]) -> Namespace:
    """What `grpo run` makes of the flags."""
    parser = ArgumentParser()
    run.register(parser)
    return parser.parse_args(flags)


def test_the_live_view_shows_every_value_whole_at_80_columns() -> None:
    lines = screen(job())
    cells = next(line.split() for line in lines if "Running" in line)
    assert cells == ["Running", "42/100", "0.6406", "0.02134", "0", "123"]
    assert next(line.split() for line in lines if "PHASE" in line) == list(COLUMNS)
    assert "model: 77K parameters, reference Clone" in lines
    assert "pod first-job-1-1-x7k2p on node-1" in lines


@pytest.mark.parametrize(
    "shown",
    [
        {"metadata": {"name": "first-job"}},
        job("a-long-name-" * 5),
        job(pods=[{"name": "\u4efb\u52a1-" * 30, "index": 0, "node": None}]),
        job(
            metrics={"kl": "1.234e-05", "reward": "-123456.7891"},
            progress={"summary": "99999999/100000000"},
        ),
        job(
            phase="Failed",
            restarts=17,
            outcome={"message": "[rank 1] OutOfMemory: " + "needs 81 GiB of 80 GiB; " * 9},
        ),
    ],
    ids=["new", "long names", "unicode", "wide numbers", "failed"],
)
def test_no_status_is_wider_than_the_terminal(shown: dict[str, Any]) -> None:
    lines = screen(shown)
    assert max(map(cell_len, lines)) <= WIDTH
    whole = "".join("".join(lines).split())
    for pod in shown.get("status", {}).get("pods", []):
        assert pod["name"] in whole
    message = shown.get("status", {}).get("outcome", {}).get("message", "")
    assert "".join(message.split()) in whole


def test_an_output_that_is_no_terminal_gets_a_line_for_each_change() -> None:
    assert status_line(job()) == "Running  step 42/100  reward 0.6406  KL 0.02134"
    assert status_line({"metadata": {"name": "first-job"}}) == "Pending"


class Recorded:
    """A cluster that answers `kubectl get` with one status after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def kubectl(self, *arguments: str, **_: Any) -> str:
        return '{"step": 42, "reward": 0.6}' if arguments[0] == "logs" else self.answers.pop(0)


def test_following_a_job_that_fails_ends_with_its_message_in_a_log_file_too() -> None:
    output = io.StringIO()
    console = Console(width=WIDTH, file=output)
    ended = job(**ENDED, outcome={"message": "[rank 1] OutOfMemory"})
    seen, history = follow(Recorded(json.dumps(ended)), "first-job", "first-job", console, 60)  # type: ignore[arg-type]
    printed = output.getvalue().splitlines()
    assert seen == ended
    assert history.series("reward") == [(42, 0.6)]
    assert "    0 s  Failed  step 42/100  reward 0.6406  KL 0.02134" in printed
    assert "[rank 1] OutOfMemory" in printed
    assert max(map(len, printed)) <= WIDTH


def test_kubectls_last_table_is_shown_as_it_is() -> None:
    output = io.StringIO()
    console = Console(width=WIDTH, file=output)
    table = "NAME        PHASE       STEP      REWARD   KL       RESTARTS\n"
    table += "first-job   Succeeded   100/100   0.9      [0.05]   0"
    show_job(Demo(console), Recorded(table), "first-job")  # type: ignore[arg-type]
    printed = output.getvalue().splitlines()
    assert printed[0] == "", "a blank line parts it from the live view"
    assert printed[1].startswith("$ kubectl get grpojob first-job --namespace first-job")
    assert printed[2:] == table.splitlines()
    assert max(map(len, printed)) <= WIDTH


def test_the_picture_is_drawn_of_what_was_logged_even_without_a_reference(tmp_path: Path) -> None:
    from examples.demo.plot import draw  # loads matplotlib, in one process of the tests

    for name, keys in (("whole", ["kl"]), ("no reference", [])):
        values = dict.fromkeys(["reward", "reward_std", "entropy", *keys], 0.5)
        draw(History({1: values, 2: values}), name, tmp_path / "pictures" / f"{name}.png")
        assert (tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@given(NAMES, TAGS)
def test_the_operators_image_lies_beside_the_trainers(place: str, tag: str) -> None:
    trainer = f"{place}grpo-trainer:{tag}"
    assert sibling(trainer) == f"{place}grpo-operator:{tag}"
    assert settings_of("image", trainer) == (
        *("--set", f"image.repository={place}grpo-trainer"),
        *("--set-string", f"image.tag={tag}"),
    )


@pytest.mark.parametrize("image", ["grpo-trainer", "registry:5000/grpo-trainer", ""])
def test_an_image_without_a_tag_is_refused(image: str) -> None:
    with pytest.raises(DemoError, match="has no tag: write <repository>:<tag>"):
        settings_of("trainerImage", image)


def test_a_trainer_of_another_name_needs_the_operators() -> None:
    with pytest.raises(DemoError, match="name the operator's with OPERATOR_IMAGE="):
        sibling("registry/my-trainer:1")


def test_it_imports_the_standard_library_alone() -> None:
    tree = ast.parse(Path(anywhere.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.realtime
def test_a_machine_without_kubectl_is_told_so() -> None:
    command = [sys.executable, "-I", anywhere.__file__, "--context", "none"]
    done = subprocess.run(
        command, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "kubectl is not on the PATH: install it first\n")
