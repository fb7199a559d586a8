"""What `grpo plan` prints at any width and for any value: every verdict is there, and values are
the server's."""

import io
import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from grpo_api.job import parse_spec
from grpo_api.report.preflight import PreflightProblem, PreflightReport
from grpo_api.text.units import GIB
from grpo_cli.__main__ import COMMANDS, main
from grpo_cli.commands.plan import path_of, with_change
from grpo_cli.show import plan_table
from grpo_cli.show.kubectl_yaml import load_value
from grpo_cli.show.plan_table import CHOSEN, SHOWN
from grpo_cli.show.preflight_report import print_report
from grpo_cli.show.terminal import console
from grpo_planner.explain.explain import decision_message
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.hardware.products import label_of
from grpo_planner.plan import plan_job
from grpo_planner.result.formatting import plan_name
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
            assert not count or f"{count / GIB:.2f}GiB" in words


def test_eighty_columns_are_stacked_and_a_pipe_gets_a_table() -> None:
    answer = planned((QWEN_7B, H100))
    narrow, wide = (printed(width, arguments=("mine", answer)) for width in (80, 240))
    assert "s/step" in wide
    assert "batch x accum  saving" in wide
    assert "batch x accum  saving" not in narrow
    assert narrow.count("s/step") >= 2


JOBS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            [
                LLAMA_1B,
                QWEN_7B,
                LLAMA_70B,
                "Qwen/Qwen3-30B-A3B",
                "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
            ]
        ),
        "placement__objective": st.sampled_from(["Balanced", "Fastest", "FewestGPUs", "Cheapest"]),
        "training__maxCompletionLength": st.sampled_from([64, 512, 4096, 60_000]),
        "training__promptsPerStep": st.sampled_from([4, 8, 64]),
        "adapter__use": st.sampled_from(["Never", "IfNeeded", "Always"]),
        "generation__engine": st.sampled_from(["Auto", "Transformers"]),
    }
)
PLACES = st.tuples(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([H100, L4, "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "A100-1g.5gb"]),
)


@cache
def drawn_plan(job: tuple[tuple[str, Any], ...], place: tuple[int, int, str]) -> PlanResult:
    count, gpus, product = place
    label = label_of(product) or product
    return plan_job(spec(**dict(job)), inventory(nodes(count, gpus, label, host_gib=200)))


@settings(max_examples=cases(200, gate=20), deadline=None)
@given(job=JOBS, place=PLACES, width=st.integers(80, WIDEST))
def test_whatever_is_planned_is_told_in_two_lines_and_true_numbers(
    job: dict[str, Any], place: tuple[int, int, str], width: int
) -> None:
    answer = drawn_plan(tuple(job.items()), place)
    name = str(job["model"])
    text = printed(width, arguments=(name, answer))
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    headline = printed(width, show=plan_table._headline, arguments=(name, answer)).splitlines()
    if answer.chosen:
        assert len(headline) <= 2
    else:
        assert lines[0].split() == [name, answer.reason]
    why = decision_message(answer)
    compared = re.search(r"^([0-9.]+) s per step(?: \(.*?\))?; (.*) would take ([0-9.]+) s: ", why)
    if compared:
        assert answer.chosen is not None
        assert compared[1] != compared[3]
        assert compared[2] != plan_name(answer.chosen)
    assert not re.search(r"(?<![0-9.])0\.0%", text)
    untrue = numbers_in(squeezed_lines(lines)) - true_numbers(answer)
    assert not untrue


def squeezed_lines(lines: list[str]) -> str:
    return "\n".join(line.strip() for line in lines)


def numbers_in(text: str) -> set[str]:
    """All numbers of a text that are not part of a name."""
    return set(re.findall(r"(?<![\w.-])[0-9]+(?:\.[0-9]+)?(?![\w-]|\.[0-9])", text))


def true_numbers(answer: PlanResult) -> set[str]:
    """The numbers of a result, of its sentences and as they are rounded for a reader."""
    document = answer.model_dump(mode="json")
    found = numbers_in(json.dumps(document).replace("\\n", " "))
    pending: list[Any] = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            found |= numbers_in(value)
        elif isinstance(value, int | float):
            found |= {f"{value:.1f}", f"{value:.2f}", f"{value / GIB:.1f}", f"{100 * value:.1f}"}
            found |= {f"{value:g}", str(value)}
    return found | {str(number) for number in range(len(answer.candidates) + 1)}


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("", 80), ("wide", 80), ("120", 120)])
def test_a_pipe_is_as_wide_as_columns_says(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width


@given(st.text(st.sampled_from("\\\\[]/ab:"), min_size=1, max_size=8))
def test_markup_in_a_name_or_a_sentence_stays_text(text: str) -> None:
    answer = planned((QWEN_7B, H100))
    assert answer.chosen is not None
    warned = answer.chosen.model_copy(update={"warnings": [f"<{text}>"]})
    out = printed(260, arguments=(f"<{text}>", answer.model_copy(update={"chosen": warned})))
    assert out.count(f"<{text}>") == 2
    report = PreflightReport(problems=[PreflightProblem(path="spec.model", message=f"<{text}>")])
    assert f"<{text}>" in printed(260, show=print_report, arguments=("mine", report))


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
    out = " ".join(capsys.readouterr().out.split())
    assert "my/model planned" in out
    assert "times count prompts of 64 tokens, the limit, and completions of" in out
    assert "(spec.training.expectedCompletionLength)" in out
    assert main([*asked, "--completion-length", "0"]) == 2
    assert "spec.training.maxCompletionLength" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
)
def test_help_and_version_fit_a_terminal_and_end_with_0(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert 0 < max(map(len, lines)) <= 80
