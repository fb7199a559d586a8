"""Scripts and configurations that make no sense: `grpo init` says so in one sentence, and runs
nothing."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.__main__ import main
from grpo_cli.from_trl.job_file import render
from grpo_cli.from_trl.job_spec import job_documents
from grpo_cli.from_trl.script_reader import read_script
from grpo_cli.from_trl.trl_run import TrlError
from grpo_cli.inputs.manifest import load_documents
from tests.generated import cases
from tests.unit.trl_scripts import CHAT, script


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:", "train.py line 1: no Python"),
        ("x = 1\0", "no Python: source code string cannot contain null bytes"),
        ("x = 1", "makes no GRPOTrainer"),
        (script() + "\ntrainer2 = GRPOTrainer('a')", "makes several trainers, at lines 8, 16"),
        (script(model="pick()"), "does not say which model is trained"),
        ("x = " + "(" * 3000 + ")" * 3000, "no Python: too many nested parentheses"),
        (script(f"seed={'-' * 9000}1"), "nested too deeply"),
        (script(f"seed={'1' * 9000}"), "no Python: Exceeds the limit"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert main(["init", "--from-trl", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("grpo: ")
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a", "holds no settings"),
        ("a: [", "while parsing"),
        ("a: 1", "has no setting of `trl grpo`"),
        ("[" * 3000, "recursion"),
    ],
)
def test_a_yaml_file_of_something_else_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["init", "--from-trl", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_options_that_mean_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", "a/b"]) == 2
    assert "--model goes with --from-trl" in capsys.readouterr().err
    assert main(["init", "-o", str(tmp_path / "no" / "job.yaml")]) == 2
    (tmp_path / "train.py").write_text(script())
    assert main(["init", "--from-trl", str(tmp_path / "train.py"), "--name", "No_name"]) == 2
    assert "--name: metadata.name is 'No_name'; it takes" in capsys.readouterr().err
    assert main(["init", "--from-trl", str(tmp_path / "none.py")]) == 2
    assert main(["init", "--from-trl", str(tmp_path)]) == 2


def check(text: str) -> None:
    """A text is refused in a sentence, or becomes a file that reads as it was meant."""
    try:
        run = read_script(text, "train.py", lambda _: None)
        documents = job_documents(run, "job", 1, "a/b", "1B")
    except TrlError as error:
        refusal, documents = str(error), None
    if documents is None:
        assert len(refusal.splitlines()) == 1
    else:
        assert load_documents(render("train.py", documents, run.notes)) == documents


FULL = script(
    "output_dir='o', **{'beta': 0.1}, learning_rate=2 * 1e-6, report_to=['wandb']", dataset=CHAT
)


@given(data=st.data())
@settings(max_examples=cases(300, gate=60))
def test_a_damaged_script_is_read_or_refused_in_a_sentence(data: st.DataObject) -> None:
    text = FULL
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 30))
        inserted = data.draw(
            st.sampled_from(["", "(", ")", "*", "**", "[", "{", ",", "\n", "é", "\0", "lambda: "])
            | st.text(max_size=5)
            | st.just(text[start : start + length] * 2)
        )
        text = text[:start] + inserted + text[start + length :]
    check(text)


NAMES = st.sampled_from(["a", "b", "c", "GRPOTrainer", "GRPOConfig", "letters", "load_dataset"])
OPERATIONS = ["+", "-", "*", "/", "//", "%", "**", "[]", "()", ".x"]
EXPRESSIONS = st.recursive(
    NAMES | st.integers(-9, 10**30).map(str) | st.text(max_size=4).map(repr),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.tuples(inner, inner, st.sampled_from(OPERATIONS)).map(
            lambda parts: {"[]": f"{parts[0]}[{parts[1]}]", "()": f"f({parts[0]}, *{parts[1]})",
                           ".x": f"({parts[0]}).map({parts[1]})"}
            .get(parts[2], f"({parts[0]} {parts[2]} {parts[1]})")
        )
        | inner.map(lambda part: f"{{'k': {part}, **{{}}}}")
        | inner.map(lambda part: f"lambda x: {part}")
    ),
    max_leaves=8,
)  # fmt: skip


@given(
    bound=st.lists(st.tuples(NAMES, EXPRESSIONS), max_size=6),
    given_=st.dictionaries(
        st.sampled_from(["model", "args", "reward_funcs", "train_dataset", "peft_config"]),
        EXPRESSIONS,
    ),
)
@settings(max_examples=cases(300, gate=60))
def test_any_expressions_are_read_without_running_them(
    bound: list[tuple[str, str]], given_: dict[str, str]
) -> None:
    lines = [f"{name} = {value}" for name, value in bound]
    arguments = ", ".join(f"{name}={value}" for name, value in given_.items())
    check("\n".join([*lines, f"trainer = GRPOTrainer({arguments})"]))
