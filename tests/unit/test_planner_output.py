"""What `grpo plan` prints at any width and for any value: every verdict is there, and values are
the server's."""

import io
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from grpo_api.job import parse_spec
from grpo_cli.__main__ import main
from grpo_cli.commands.plan import path_of, with_change
from grpo_cli.inputs.manifest import load_value
from grpo_cli.show import plan_table
from grpo_cli.show.plan_table import CHOSEN, SHOWN
from grpo_cli.show.terminal import gib
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanResult
from tests.generated import cases
from tests.unit.planning import H100, L4, LLAMA_1B, LLAMA_70B, QWEN_7B, inventory, nodes, spec

NARROWEST, WIDEST = 20, 260
CASES = ((LLAMA_1B, H100), (QWEN_7B, H100), (QWEN_7B, L4), (LLAMA_70B, L4))


@cache
def planned(case: tuple[str, str]) -> PlanResult:
    model, product = case
    return plan_job(spec(model), inventory(nodes(2, 4, product, host_gib=200)))


def printed(width: int, *, show: Any = plan_table.show_plan, arguments: Any) -> str:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    show(out, *arguments)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def squeezed(text: str) -> str:
    """Without spaces and line ends, which is where a line may be broken."""
    return "".join(text.split())


@given(width=st.integers(NARROWEST, WIDEST), case=st.sampled_from(CASES))
@settings(max_examples=cases(60))
def test_no_width_loses_a_verdict_or_a_time(width: int, case: tuple[str, str]) -> None:
    answer = planned(case)
    text = printed(width, arguments=("mine", answer))
    assert max(map(len, text.splitlines())) <= width
    words = squeezed(text)
    for candidate in answer.candidates[:SHOWN]:
        assert squeezed(candidate.rejected.message if candidate.rejected else CHOSEN) in words
        if candidate.estimated_step_seconds is not None:
            assert f"{candidate.estimated_step_seconds:.1f}" in words
    assert all(squeezed(fix.message) in words for fix in answer.fixes)


@given(width=st.integers(NARROWEST, WIDEST))
@settings(max_examples=cases(20))
def test_no_width_loses_a_difference(width: int) -> None:
    before, after = planned((LLAMA_1B, H100)), planned((QWEN_7B, H100))
    text = printed(width, show=plan_table.show_difference, arguments=("model", before, after))
    assert max(map(len, text.splitlines())) <= width
    words = squeezed(text)
    for result in (before, after):
        assert result.chosen is not None
        assert result.chosen.memory is not None
        for count in result.chosen.memory.phases.model_dump().values():
            assert not count or f"{gib(count):.2f}GiB" in words


def test_eighty_columns_are_stacked_and_a_pipe_gets_a_table() -> None:
    answer = planned((QWEN_7B, H100))
    narrow, wide = (printed(width, arguments=("mine", answer)) for width in (80, 240))
    assert "s/step" in wide
    assert "batch x accum  saving" in wide
    assert "batch x accum  saving" not in narrow
    assert narrow.count("s/step") >= 2


def test_what_does_not_fit_shows_no_time() -> None:
    for case in CASES:
        for candidate in planned(case).candidates:
            fits = candidate.rejected is None or candidate.rejected.reason not in (
                "DeviceMemory",
                "HostMemory",
            )
            assert (candidate.estimated_step_seconds is not None) == fits


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("learningRate=5e-6", "training.learning_rate", 5e-6),
        ("numGenerations=16.0", "training.num_generations", 16),
        ("numGenerations=1.6e1", "training.num_generations", 16),
        ("adapter.targetModules=[q_proj, v_proj]", "adapter.target_modules", ["q_proj", "v_proj"]),
        ("gpus=null", "placement.gpus", None),
        ("gpus=4.0", "placement.gpus.max", 4),
        ("spec.placement.gpus={min: 2, max: null}", "placement.gpus.max", None),
        ("spec.training=null", "training.num_generations", 8),
    ],
)
def test_what_if_takes_values_as_the_server_does(text: str, path: str, value: object) -> None:
    found: Any = with_change(spec(LLAMA_1B, placement__gpus={"max": 2}), text)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@given(number=st.floats(1e-9, 0.9), letter=st.sampled_from("eE"))
@settings(max_examples=cases(50))
def test_every_spelling_of_a_number_is_one(number: float, letter: str) -> None:
    spelled = f"{number:.9e}".replace("e", letter)
    assert with_change(spec(), f"learningRate={spelled}").training.learning_rate == float(spelled)


@given(
    st.dictionaries(st.sampled_from(["numGenerations", "maxCompletionLength", "beta"]), st.none())
)
@settings(max_examples=cases(10))
def test_a_null_is_a_field_that_is_not_set(nulls: dict[str, None]) -> None:
    document = {"model": {"name": "m"}, "dataset": {"name": "d"}, "rewards": [{"accuracy": {}}]}
    assert parse_spec(document | {"training": nulls}).training == parse_spec(document).training
    for name in nulls:
        assert with_change(spec(), f"{name}=null") == with_change(
            spec(), f"{path_of(name)}={load_value('~') or 'null'}"
        )


def test_a_model_is_planned_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", QWEN_7B, "--gpus", "8xH100", "--host-memory", "1Ti"]
    assert main([*asked, "--completion-length", "2048", "-o", "json"]) == 0
    there = nodes(1, 8, H100)
    wanted = spec(QWEN_7B, training__maxCompletionLength=2048, generation__engine="Auto")
    expected = plan_job(wanted, Inventory((there,), reports_disk=True))
    assert PlanResult.model_validate_json(capsys.readouterr().out) == expected
    assert (
        main(
            ["plan", "my/model", "--gpus", "8xH100", "--parameters", "7B", "--prompt-length", "64"]
        )
        == 0
    )
    assert "my/model  planned" in capsys.readouterr().out
    assert main([*asked, "--completion-length", "0"]) == 2
    assert "spec.training.maxCompletionLength" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["gpus", "--help"]])
def test_help_and_version_end_with_0(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out
