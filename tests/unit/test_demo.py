"""`make demo CONTEXT=…` needs nothing installed and says what is missing; e2e/test_quickstart.py runs it whole."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.demo import anywhere
from examples.demo.anywhere import DemoError, settings_of, sibling

NAMES = st.from_regex(r"([a-z0-9.]{1,9}(:[0-9]{2,5})?/)?([a-z0-9]{1,9}/){0,2}", fullmatch=True)
TAGS = st.from_regex(r"[A-Za-z0-9_][-A-Za-z0-9_.]{0,9}", fullmatch=True)


@given(NAMES, TAGS)
def test_the_operators_image_lies_beside_the_trainers(place: str, tag: str) -> None:
    trainer = f"{place}grpo-trainer:{tag}"
    assert sibling(trainer) == f"{place}grpo-operator:{tag}"
    assert settings_of("image", trainer) == (
        *("--set", f"image.repository={place}grpo-trainer"),
        *("--set", f"image.tag={tag}"),
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
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "kubectl is not on the PATH: install it first\n")
