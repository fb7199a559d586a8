"""`grpo diagnose` reads every kind of file that people have of a run."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.findings.diagnosis import diagnose
from grpo_api.findings.step_row import step_row
from grpo_api.report.report import STEP_PHASES
from grpo_cli.__main__ import main
from grpo_cli.inputs.run_history import number_steps, printed_rows
from grpo_codegen.stories.logged_runs import SICK, STEPS, logged_steps
from tests.generated import cases
from tests.unit.test_findings import rows


def written(path: Path, steps: list[dict[str, Any]]) -> str:
    """The steps in a file of the kind that its name says."""
    if path.name == "trainer_state.json":
        path.write_text(json.dumps({"log_history": steps, "global_step": len(steps)}))
    elif path.suffix in TABLES:
        keys, separator = list(steps[0]), TABLES[path.suffix]
        table = [keys] + [[str(row[key]) for key in keys] for row in steps]
        path.write_text("\n".join(map(separator.join, table)))
    elif path.name == "printed.log":
        path.write_text(printed(steps))
    elif path.name == "swift.jsonl":
        parts = [{"global_step/max_steps": f"{row.pop('step')}/{len(steps)}"} for row in steps]
        logged = [part | row for part, row in zip(parts, steps, strict=True)]
        path.write_text("\n".join(map(json.dumps, logged)))
    else:
        path.write_text("a line of a log\n" + "\n".join(map(json.dumps, steps)))
    return str(path)


def printed(steps: list[dict[str, Any]]) -> str:
    """The steps as transformers prints them: dicts of numbers or of text, beside a progress bar."""
    lines = ["Loading weights: 100%|██████████| 3/3", "{'not a dict': }", "{1: {2}, [}"]
    for at, row in enumerate(steps, start=1):
        logs = {key: str(value) if at % 2 else value for key, value in row.items() if key != "step"}
        lines.append(f"\r {at}%|█▎   | {at}/{len(steps)} [20:01<2:01, 20.9s/it]{logs} ")
    lines.append("{'train_runtime': 12.3, 'train_loss': nan, 'epoch': 1.0}")
    return "\n".join(lines)


TABLES = {".csv": ",", ".CSV": ";", ".tsv": "\t", ".txt": ", "}
"""What stands between the columns, by the suffix of a file."""
KINDS = ["trainer_state.json", "run.jsonl", "printed.log", "swift.jsonl"]
KINDS += [f"run{suffix}" for suffix in TABLES]


@pytest.mark.parametrize("name", KINDS)
def test_diagnose_reads_every_kind_of_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    sick = written(tmp_path / name, logged_steps(SICK["the reward falls"][1]))
    assert main(["diagnose", sick, "-o", "json"]) == 3
    (item,) = json.loads(capsys.readouterr().out)
    assert item.keys() == {"finding", "since", "confidence", "evidence", "advice"}
    assert item["finding"] == "RewardFalling"
    well = written(tmp_path / name, logged_steps())
    assert main(["diagnose", well]) == 0
    assert capsys.readouterr().out == f"{well}: no findings in {STEPS} steps\n"


def test_diagnose_reads_what_other_programs_make_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = logged_steps(SICK["the reward falls"][1])
    lines = Path(written(tmp_path / "run.jsonl", steps)).read_text()
    with_commas = Path(written(tmp_path / "run.CSV", steps)).read_text().replace(".", ",")
    panel = ["Step,lucky-sun-7 - train/reward,lucky-sun-7 - train/reward__MIN"]
    panel += [f"{row['step']},{row['reward']},0" for row in steps]
    contents = {
        "powershell.jsonl": lines.encode("utf-16"),
        "excel.csv": with_commas.encode(),
        "panel.csv": "\n".join(panel).encode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        main(["diagnose", str(tmp_path / name)])
        assert "RewardFalling since step" in capsys.readouterr().out, name
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["diagnose", "-"]) == 3
    assert capsys.readouterr().out.startswith("-: RewardFalling")
    panel[0] += ",other - train/reward"
    (tmp_path / "panel.csv").write_text("\n".join(panel))
    assert main(["diagnose", str(tmp_path / "panel.csv")]) == 2
    assert "2 runs (lucky-sun-7, other); give one" in capsys.readouterr().err


@pytest.mark.parametrize("empty", [math.nan, None, ""])
def test_a_table_with_rows_of_evaluations_and_durations_is_read_whatever_fills_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: float | str | None
) -> None:
    """pandas writes NaN where a row of W&B logs nothing."""
    logged: list[dict[str, Any]] = []
    for step in logged_steps(steps=40):
        row = {f"train/{key}": value for key, value in step.items() if key != "step"}
        at = {"train/global_step": step["step"]}
        rest = {**dict.fromkeys(row, empty), "train/epoch": 0.1, "eval/reward": empty}
        logged += [{**rest, **at, "profiling/a": 1.0}, rest | row | at]
        logged += [{**rest, **at, "eval/reward": 1.0}] if step["step"] % 10 == 0 else []
    name = str(tmp_path / "history.json")
    for items in (logged, [row | {"train/global_step": ""} for row in logged]):
        numbered = [{"_step": at} | row for at, row in enumerate(items)]
        Path(name).write_text(json.dumps(numbered))
        assert main(["diagnose", name]) == 0, capsys.readouterr().out


def test_spaces_around_the_names_of_columns_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written(tmp_path / "run.csv", logged_steps(SICK["the reward falls"][1]))
    header, _, lines = Path(table).read_text().partition("\n")
    Path(table).write_text("\n".join([header.replace(",", " , "), lines]))
    assert main(["diagnose", table]) == 3
    assert "RewardFalling since step" in capsys.readouterr().out


def test_numbers_that_python_prints_by_name_are_read() -> None:
    text = "12 {'loss': nan, 'reward': -inf, 'note': 'nan: nan', 'kl': 0.5}"
    (row,) = printed_rows(text)
    assert row == {"loss": "nan", "reward": "-inf", "note": "nan: nan", "kl": 0.5}
    evaluated = {"eval_reward": 2.0, "epoch": 1.0}
    assert [row["step"] for row in number_steps([row, evaluated, {"reward": 1}])] == [1, 1, 2]


def test_steps_are_read_beside_other_json_and_behind_names_of_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = logged_steps(SICK["the reward falls"][1])
    settings = json.dumps({"learning_rate": 1e-6, "beta": 0.0})
    in_json = [json.dumps({**row, "kl": None, "is_last": False}) for row in steps]
    logs = [f"{settings}\n{printed(steps)}", "\n".join(f"trainer-0 | {line}" for line in in_json)]
    for text in logs:
        (tmp_path / "run.log").write_text(text)
        assert main(["diagnose", str(tmp_path / "run.log")]) == 3
        assert "RewardFalling since step" in capsys.readouterr().out


def test_a_rank_of_an_earlier_attempt_is_no_straggler_of_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(attempt: int, ranks: list[float]) -> list[dict[str, Any]]:
        first = 60 * (attempt - 1)
        return [
            row | {"attempt": attempt, "rank_seconds": ranks}
            for row in logged_steps(steps=120)
            if first < row["step"] <= first + 60
        ]

    rows_of_both = [*slow(1, [1.0, 1.0, 1.0, 2.0]), *slow(2, [1.0] * 4)[:3]]
    assert main(["diagnose", written(tmp_path / "run.jsonl", rows_of_both)]) == 0
    assert main(["diagnose", written(tmp_path / "run.jsonl", rows_of_both[:60])]) == 3
    assert "Straggler since step" in capsys.readouterr().out


HACKED = "format is rewarded and accuracy lost, longer answers"


def test_rewards_under_the_keys_of_trl_0_15_are_judged() -> None:
    early = [
        {key.replace("/mean", "") if "rewards" in key else key: row[key] for key in row}
        for row in logged_steps(SICK[HACKED][1])
    ]
    assert "rewards/accuracy" in early[0]
    assert [finding.finding for finding in diagnose(rows(early))] == ["RewardHacking"]
    in_notebook = [{key.replace("/", " / "): row[key] for key in row} for row in early]
    assert list(map(step_row, in_notebook)) == rows(early)
    of_dpo = {"step": 1, "rewards/chosen": 1, "rewards/margins": 1, "rewards/accuracy/std": 1}
    assert step_row(of_dpo) is None


def test_rows_of_a_tracker_without_the_trainer_s_step_belong_to_the_next_one() -> None:
    timed = {"_step": 7, "train/global_step": "", "profiling/a": 1.0}
    logged: list[dict[str, Any]] = [
        {"train/global_step": 1, "_step": 6, "train/reward": 2},
        timed,
        {"train/global_step": 2.0, "_step": 8, "train/reward": 3},
        {**timed, "_step": 9},
    ]
    assert [row["step"] for row in number_steps(logged)] == [1, 2, 2, 2]
    parsed = step_row(logged[0])
    assert parsed is not None
    assert parsed.step == 1


def test_the_phases_of_a_step_are_no_number_of_the_step() -> None:
    phases = {f"phase_seconds/{phase}": 0.25 for phase in STEP_PHASES}
    logged = [{**phases, "reward": 0.5, "step": at} for at in (1, 2)]
    assert [row["step"] for row in number_steps(logged)] == [1, 2]


@pytest.mark.parametrize(
    "logged",
    [
        {"loss": 1.0, "mean_token_accuracy": 0.9, "entropy": 0.01},
        {"loss": 0.4, "kl": 9.0, "rewards/chosen": 1.0, "rewards/margins": 1.0},
        {"train/completions/mean_length": 300.0},
        {"train/step": 1, "train/loss": 1.0, "train/grad_norm": 90.0, "rollout/raw_reward": 0.5},
        {"critic/score/mean": 0.5, "actor/entropy": 0.01, "response_length/mean": 300.0},
    ],
    ids=["SFT", "KTO", "a panel of W&B", "slime", "verl"],
)
def test_steps_without_rewards_are_refused_and_neither_well_nor_sick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: dict[str, float]
) -> None:
    early = logged | {"entropy": 1.0} if "entropy" in logged else logged
    steps = [{"step": at, **(early if at < 9 else logged)} for at in range(1, 61)]
    assert main(["diagnose", written(tmp_path / "run.jsonl", steps)]) == 2
    assert "run.jsonl has no steps with TRL's key reward" in capsys.readouterr().err


def test_a_run_whose_rewards_are_all_null_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL logs them so, and evaluations alone are judged."""
    silent = [row | {"reward": None, "reward_std": None} for row in logged_steps(steps=30)]
    assert main(["diagnose", written(tmp_path / "run.jsonl", silent)]) == 3
    assert "NoReward since step 1" in capsys.readouterr().out
    evaluated = [{"step": at, "eval_reward": 0.5} for at in range(1, 31)]
    assert main(["diagnose", written(tmp_path / "run.jsonl", evaluated)]) == 0
    assert "most rules need rewards, and none is logged" in capsys.readouterr().out


@given(text=st.text(alphabet="{}[]()'\"\\:, \r\nnaif1.e-x", max_size=60))
@settings(max_examples=cases(500, gate=50))
def test_any_text_of_a_terminal_is_read(text: str) -> None:
    assert all(isinstance(row, dict) for row in number_steps(list(printed_rows(text))))


def test_diagnose_names_the_run_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = written(tmp_path / "sick.jsonl", logged_steps(SICK["entropy rises"][1]))
    well = written(tmp_path / "well.jsonl", logged_steps(steps=10))
    assert main(["diagnose", well, sick]) == 3
    out = capsys.readouterr().out
    assert f"{well}: no findings in 10 steps; most rules need 20 steps" in out
    assert f"{sick}: EntropyExploding since step" in out
    main(["diagnose", well, sick, "-o", "json"])
    assert [item["run"] for item in json.loads(capsys.readouterr().out)] == [sick]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"nothing", b"[1, 2]", b'{"step": 1}', b"[" * 100_000, b"a,b\n1,2"],
)
def test_a_file_without_steps_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    for name in ("run.json", "run.csv"):
        (tmp_path / name).write_bytes(content)
        assert main(["diagnose", str(tmp_path / name)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["diagnose", str(tmp_path / "absent")]) == 2
