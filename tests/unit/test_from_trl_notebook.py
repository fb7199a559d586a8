"""A notebook becomes the job of the script that its code cells are; names of earlier TRL versions
and trainers of other files are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.__main__ import main
from grpo_cli.from_trl.notebook import code_cells
from grpo_cli.from_trl.trl_run import TrlError
from tests.generated import cases
from tests.unit.trl_scripts import MODEL, init, notes, script, spec_of

MAGICS = (
    "%pip install -q trl[vllm]", "!nvidia-smi",
    "pip install trl", "!pip install \\\n  trl \\\n  peft", "files = !ls", "%load_ext autoreload",
    "GRPOConfig?", "?GRPOTrainer", "here, there = %sx ls", "    !rm -rf out", "!",
)  # fmt: skip


PLAIN = "x = '''Ready?\n%d of %s\n!''', 7 \\\n% 2"
"""Python whose lines look like IPython's."""


def notebook(*sources: str, by_line: bool = False) -> str:
    """A notebook with these code cells and a text before each."""
    cells: list[dict[str, Any]] = []
    for source in sources:
        written = source.splitlines(keepends=True) if by_line else source
        cells.append({"cell_type": "markdown", "metadata": {}, "source": "import nothing ("})
        cells.append({"cell_type": "code", "metadata": {}, "outputs": [], "source": written})
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.parametrize("by_line", [False, True])
def test_a_notebook_makes_the_job_of_its_script(tmp_path: Path, by_line: bool) -> None:
    text = script("beta=0.02, learning_rate=2e-6, num_generations=4")
    imports, trainer = text.split("\ntrainer = ")
    cells = (
        "%pip install trl\n!nvidia-smi",
        f"{imports}\nshown = !ls",
        "%%bash\nfor file in *; do echo $file; done",
        f"%%time\nshown = 'a\u2028b'\ntrainer = {trainer}",
    )
    written = spec_of(tmp_path, notebook(*cells, by_line=by_line), name="train.ipynb")
    assert written == spec_of(tmp_path, text)
    (tmp_path / "train.py").unlink()
    assert init(tmp_path, notebook(text), name="train.ipynb")[-1]["metadata"]["name"] == "train"


@given(
    pieces=st.lists(st.sampled_from(MAGICS) | st.just(PLAIN), max_size=6),
    cut=st.integers(0, 8),
)
@settings(max_examples=cases(100, gate=12))
def test_what_ipython_adds_to_python_is_left_out(pieces: list[str], cut: int) -> None:
    cells = ["if True:", *(f"    {piece.strip()}" for piece in pieces if piece != PLAIN)]
    cells.append("    y = 1")
    plain = [piece for piece in pieces if piece == PLAIN]
    text = "\n".join(code_cells(notebook("\n".join(cells), *plain[:cut]), "a.ipynb"))
    names: dict[str, Any] = {}
    exec(compile(text, "a.ipynb", "exec"), names)  # nothing but what the test itself wrote
    assert names["y"] == 1
    assert names.get("x") == (("Ready?\n%d of %s\n!", 1) if plain[:cut] else None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cells", "cell_type", "source", "code"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(document=JSON)
@settings(max_examples=cases(200, gate=25))
def test_any_json_is_a_script_or_refused_in_a_sentence(document: object) -> None:
    refusal = ""
    try:
        code_cells(json.dumps(document), "a.ipynb")
    except TrlError as error:
        refusal = str(error)
    has_cells = isinstance(document, dict) and isinstance(document.get("cells"), list)
    assert refusal.startswith("a.ipynb is no notebook") != has_cells
    assert len(refusal.splitlines()) == int(not has_cells)


@pytest.mark.parametrize("text", ["", "[", "x = 1", "[" * 5000])
def test_a_file_that_is_no_json_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(text)
    assert main(["init", "--from-trl", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "grpo: train.ipynb is no notebook: it is not JSON"


def test_notes_name_the_cell_and_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script("beta=bonus, run_name='line 3', seed=rate").replace("trainer =", "\0trainer =")
    imports, trainer = text.split("\0")
    rate = "%pip install trl\nrate = 3\nif pick():\n    rate = 2"
    spec_of(tmp_path, notebook(rate, "%%time\n!ls\n", imports, trainer), name="train.ipynb")
    said = notes(tmp_path)
    assert "line 4 of code cell 4: beta = bonus: it is computed" in "\n".join(said)
    lines = "rate is assigned at lines 2 of code cell 1, 4 of code cell 1, depending"
    assert any(lines in note for note in said)
    assert "line 4 of code cell 4: run_name = line 3: it has no effect without report_to" in said
    path = tmp_path / "train.ipynb"
    path.write_text(notebook("x = 1", "y = 2\ndef f(:"))
    assert main(["init", "--from-trl", str(path)]) == 2
    assert "train.ipynb line 2 of code cell 2: no Python" in capsys.readouterr().err


def test_fields_have_the_places_of_their_present_names(tmp_path: Path) -> None:
    text = script("use_vllm=True, vllm_max_model_len=2048, use_liger_loss=True")
    spec = spec_of(tmp_path, text)
    assert spec["generation"]["maxModelLength"] == 2048
    assert any("use_liger_loss" in note or "use_liger_kernel" in note for note in notes(tmp_path))
    lines = "model_name_or_path: a/b-1B\ntorch_dtype: bfloat16\ndataset_name: c/d\n"
    assert spec_of(tmp_path, lines, name="c.yaml")["training"]["dtype"] == "bfloat16"


def test_a_trainer_of_another_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script().replace("GRPOTrainer(", "OwnGRPOTrainer(")
    (tmp_path / "train.py").write_text(text)
    assert main(["init", "--from-trl", str(tmp_path / "train.py")]) == 2
    assert "makes no GRPOTrainer but OwnGRPOTrainer: " in capsys.readouterr().err


def test_a_space_without_its_owner_is_asked_for(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, script("report_to='trackio', trackio_space_id='runs'"))
    assert "trackio" not in spec.get("tracking", {})
    assert any("a Space (OWNER/NAME) or a server" in note for note in notes(tmp_path))


def test_a_variable_of_a_notebook_is_named_without_its_value(tmp_path: Path) -> None:
    init(tmp_path, notebook("%env HF_TOKEN=SECRET", script()), name="train.ipynb")
    (note,) = (note for note in notes(tmp_path) if "HF_TOKEN" in note)
    assert "SECRET" not in note


def test_a_recipe_is_read_as_trl_s_parser_reads_it(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("from tools import norm\ndef brief(completions, **_): ...")
    (tmp_path / "tools.py").write_text("norm = str")
    lines = (
        "model_name_or_path: a/b-1B\nuse_vllm: 'yes'\nreward_funcs: [judges.brief, tag_count]\n"
        "reward_weights: [1, 0.5]\nsystem_prompt: Think.\n"
    )
    config_map, job = init(tmp_path, lines, name="recipe.yaml")
    assert sorted(config_map["data"]) == ["judges.py", "rewards.py", "tools.py"]
    assert job["spec"]["generation"]["engine"] == "Colocated"
    rewards = [(reward["name"], reward.get("weight", 1)) for reward in job["spec"]["rewards"]]
    assert rewards == [("brief", 1), ("tag_count", 0.5)]
    said = "\n".join(notes(tmp_path))
    assert "write it as tag_count of rewards.py" in said
    assert "system_prompt = Think.: set dataset.systemPrompt" in said


@pytest.mark.parametrize(
    ("settings_text", "share"),
    [
        ("warmup_ratio=0.1", 0.1),
        ("warmup_steps=50, warmup_ratio=0.1", 0.5),
        ("warmup_ratio=0.1, warmup_steps=0", 0.1),
        ("warmup_ratio=None, warmup_steps=0.2", 0.2),
    ],
)
def test_steps_of_warm_up_count_before_their_share(
    tmp_path: Path, settings_text: str, share: float
) -> None:
    text = script(f"{settings_text}, max_prompt_length=None, max_steps=100")
    training = spec_of(tmp_path, text)["training"]
    assert training["warmupRatio"] == share
    assert "maxPromptLength" not in training


@pytest.mark.parametrize("name", ["./data/prompts", "json"])
def test_a_folder_in_a_recipe_is_no_dataset_of_the_hub(tmp_path: Path, name: str) -> None:
    lines = f"model_name_or_path: a/b-1B\ndataset_name: {name}\n"
    files = spec_of(tmp_path, lines, name="recipe.yaml")["dataset"]["files"]
    assert files["paths"] == ["train.jsonl"]
    assert any(f"dataset_name = {name}: no dataset of the hub" in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    ("processes", "options", "prompts"),
    [("4", [], 4), ("4", ["--processes", "2"], 2), ("4", ["--processes", "4"], 4), ("many", [], 1)],
)
def test_a_recipe_s_processes_are_those_that_launch_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: str, options: list[str],
    prompts: int,
) -> None:  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model_name_or_path: a/b-1B\nnum_processes: {processes}\n")
    assert main(["init", "--from-trl", str(path), *options]) == 0
    captured = capsys.readouterr()
    assert f"  promptsPerStep: {prompts}\n" in captured.out
    assert ("give the number by --processes" in captured.err) == (prompts != 4)
    assert ("one process was assumed" in captured.err) == (prompts == 1)


def test_a_shell_command_of_several_lines_is_left_out(tmp_path: Path) -> None:
    command = (
        "if True:\n    !uv pip install -q \\\n        a==1 \\\n        git+https://b.c@0add68\n"
    )
    spec = spec_of(tmp_path, notebook(f"{command}{script('beta=0.5')}"), name="train.ipynb")
    assert spec["training"]["beta"] == 0.5


MARIMO = f"""
import marimo
app = marimo.App()
@app.cell
def _():
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer
    return GRPOConfig, GRPOTrainer, load_dataset
@app.cell(hide_code=True)
def _(GRPOConfig):
    LEAST = 3
    args = GRPOConfig(beta=0.5)
    return LEAST, args
@app.cell
def _(LEAST):
    def letters(completions, **kwargs):
        return [float(len(text) > LEAST) for text in completions]
    return (letters,)
@app.cell
def _(GRPOTrainer, args, letters, load_dataset):
    rows = load_dataset("openai/gsm8k", "main", split="train")
    trainer = GRPOTrainer("{MODEL}", letters, args, rows)
    trainer.train()
    return
"""


def test_a_notebook_of_marimo_makes_the_job_of_its_cells(tmp_path: Path) -> None:
    rewards, job = init(tmp_path, MARIMO)
    assert job["spec"]["training"]["beta"] == 0.5
    assert job["spec"]["dataset"]["name"] == "openai/gsm8k"
    assert "LEAST = 3\n\ndef letters(" in rewards["data"]["rewards.py"]
    assert notes(tmp_path) == []
