"""Bad data: every fault stops the run before its first step, with the file, the row and the column.

`ArrowInvalid` and no row is what users get elsewhere.
"""

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.training import TrainingSpec
from grpo_trainer.data.dataset import load_prompts, read_rows
from grpo_trainer.gang import ranks
from grpo_trainer.runtime.errors import BadInput

GOOD = '{"prompt": "1+1=", "answer": "2"}'
CHAT = {"role": "user", "content": "hi"}


def spec(name: str, **fields: Any) -> DatasetSpec:
    files = {"configMap": {"name": "data"}, "paths": [name], "format": fields.pop("format", "Auto")}
    return DatasetSpec.model_validate({"files": files, **fields})


def load(
    root: Path,
    name: str,
    training: TrainingSpec | None = None,
    template: bool = True,
    **fields: Any,
) -> None:
    dataset = spec(name, **fields)
    tokenizer = tiny_tokenizer() if template else tiny_tokenizer(None)
    load_prompts(dataset, training or TrainingSpec(prompts_per_step=1), tokenizer, root=root)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a.jsonl is empty"),
        (b"\n\n", r"a.jsonl has no rows"),
        (
            GOOD.encode() + b"\n{oops}\n",
            r"a.jsonl line 2 is not a JSON object: Expecting property name.*; write one per line, ",
        ),
        (b'["a"]\n', r"a.jsonl line 1 is not a JSON object but '\[\"a\"\]'; write one per line"),
        (b'{"prompt": "x", "prompt": "y"}\n', r"a.jsonl line 1: column 'prompt' occurs twice"),
        (
            GOOD.encode() + b'\n\n{"prompt": "x", "answer": "\xe4"}\n',
            r"a.jsonl line 3, column 'answer' is not UTF-8 \(b'\\xe4'\)",
        ),
        (b'{"prompt": "x", "answer": "\\ud800"}', r"a.jsonl line 1, column 'answer' is not UTF-8"),
        (
            b'{"answer": "2"}\n',
            r"dataset.promptColumn: the dataset has no column 'prompt'; it has answer",
        ),
        (
            GOOD.encode() + b'\n{"answer": "2"}',
            r"a.jsonl line 2, column 'prompt': None is neither text nor a list",
        ),
        (
            GOOD.encode() + b'\n{"prompt": " ", "answer": "2"}',
            r"a.jsonl line 2, column 'prompt': the prompt is empty",
        ),
        (
            GOOD.encode() + b'\n{"prompt": ["x"], "answer": "2"}',
            r"a.jsonl line 2, column 'prompt': \['x'\] is not of the type",
        ),
        (
            GOOD.encode() * 1 + b"\n" + GOOD.encode() + b'\n{"prompt": "x", "answer": 3}',
            r"a.jsonl line 3, column 'answer': 3 is not of",
        ),
        (
            b'{"prompt": 7}',
            (
                r"a.jsonl line 1, column 'prompt': 7 is neither text nor a list of {role, content} "
                r"messages"
            ),
        ),
        (b'{"prompt": "x", "n": 123456789012345678901234567890}', r"a.jsonl line 1, column 'n'"),
        (
            b'{"prompt": "x", "completions": "y"}',
            r"column 'completions' has a name .* such as my_completions",
        ),
        (b"[" * 100_000, r"a.jsonl line 1 is not a JSON object"),
        (
            b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
            r"a.jsonl line 1 is not a JSON object: Exceeds",
        ),
    ],
)
def test_jsonl_faults(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load(tmp_path, "a.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a.csv is empty"),
        (b"prompt,answer\n", r"a.csv has no rows"),
        (b"prompt,prompt\nx,y\n", r"a.csv line 1: column 'prompt' occurs twice"),
        (
            b"prompt,answer\nx,y\nx,y,z\n",
            r"a.csv line 3: 3 cells under a header of 2; quote cells with commas",
        ),
        (
            b'prompt,answer\n"two\nlines",y\nx,\xff\n',
            r"a.csv line 4, column 'answer' is not UTF-8 \(b'\\xff'\)",
        ),
        (b'prompt,answer\n"x"y,z\n', r"a.csv line 2 is not CSV"),
        (b'prompt,answer\n"open,y\n', r"a.csv line 2 is not CSV: unexpected end of data"),
        (b"prompt,answer\n,y\n", r"a.csv line 2, column 'prompt': the prompt is empty"),
    ],
)
def test_csv_faults(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load(tmp_path, "a.csv")


def test_parquet_faults(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(BadInput, match=r"a.parquet can't be read as Parquet"):
        load(tmp_path, "a.parquet")
    invalid = pa.StringArray.from_buffers(
        1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")
    )
    pq.write_table(pa.table({"prompt": ["x"], "answer": invalid}), tmp_path / "b.parquet")
    with pytest.raises(
        BadInput, match=r"b.parquet row 1, column 'answer' is not valid .*Invalid UTF8"
    ):
        load(tmp_path, "b.parquet")
    pq.write_table(pa.table({"prompt": ["x", None]}), tmp_path / "c.parquet")
    with pytest.raises(BadInput, match=r"c.parquet row 2, column 'prompt': None is neither text"):
        load(tmp_path, "c.parquet")
    scores = pa.array([[("right", 1)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"prompt": ["x"], "scores": scores}), tmp_path / "d.parquet")
    with pytest.raises(BadInput, match=r"d.parquet, column 'scores': .*map.* Leave it out, or"):
        load(tmp_path, "d.parquet")


@pytest.mark.parametrize("most_rows", [None, 2])
def test_a_parquet_column_that_occurs_twice_is_named(most_rows: int | None, tmp_path: Path) -> None:
    column = pa.array(["x", "y"])
    pq.write_table(pa.table([column] * 3, ["prompt", "a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"^a.parquet: column 'a' occurs twice; give each column"):
        read_rows(spec("a.parquet"), root=tmp_path, most_rows=most_rows)


def test_a_table_without_a_row_is_named_in_a_preflight_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    for most_rows in (None, 2):
        with pytest.raises(BadInput, match=r"^dataset: it has no row; name files, or a split"):
            read_rows(spec("a.parquet"), root=tmp_path, most_rows=most_rows)


@pytest.mark.parametrize(
    "times",
    [
        pa.array([0, 2932897], pa.date32()),
        pa.array([0, -(2**62)], pa.timestamp("ms")),
        pa.array([0, 0], pa.timestamp("us", tz="Nowhere/There")),
        pa.array([0, 2**62], pa.duration("s")),
        pa.array([[0], [1, 2932897]], pa.list_(pa.date32())),
        pa.array([{"day": 0}, {"day": 2932897}], pa.struct({"day": pa.date32()})),
    ],
    ids=str,
)
def test_a_time_that_python_does_not_have_is_named(times: pa.Array, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x", "y"], "at": times}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"^a.parquet row [12], column 'at': a date or time that "):
        load(tmp_path, "a.parquet")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], r"line 1, column 'prompt': \[\] is neither text nor"),
        (["hi"], r"line 1, column 'prompt', message 1: 'hi' is not a message"),
        (
            [CHAT, {"role": "user"}],
            r"message 2 has the keys \['role'\]; both role and content are needed",
        ),
        ([{**CHAT, "name": "x"}], r"message 1 has the keys \['content', 'name', 'role'\]"),
        (
            [{"role": "robot", "content": "x"}],
            r"message 1: role 'robot' must be one of system, user, assistant, tool",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r"message 1: content \[.*\] is not text",
        ),
        (
            [{"role": "system", "content": "x"}, CHAT],
            r"line 1, column 'prompt' has a system message already",
        ),
    ],
)
def test_chat_faults(tmp_path: Path, chat: list[Any], message: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": chat, "answer": "2"}))
    with pytest.raises(BadInput, match=message):
        load(tmp_path, "a.jsonl", systemPrompt="Be brief.")


def test_a_chat_needs_a_chat_template(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    load(tmp_path, "a.jsonl", template=False)
    with pytest.raises(
        BadInput, match=r"the model's tokenizer has no chat template; set model.chatTemplate"
    ):
        load(tmp_path, "a.jsonl", template=False, systemPrompt="Be brief.")


def test_the_row_that_a_chat_template_rejects_is_named(tmp_path: Path) -> None:
    rows = [[CHAT], [CHAT, {"role": "tool", "content": "x"}], [CHAT]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% "
        "endif %}"
        "{{ m.content }}{% endfor %}"
    )
    dataset = DatasetSpec.model_validate(
        {"files": {"configMap": {"name": "data"}, "paths": ["a.jsonl"]}}
    )
    with pytest.raises(
        BadInput,
        match=r"a.jsonl line 2, column 'prompt': the model's chat template rejects .*no tools",
    ):
        load_prompts(dataset, TrainingSpec(prompts_per_step=1), tokenizer, root=tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(BadInput, match=rf"^{name} is a pointer of Git LFS.*run `git lfs pull`"):
        load(tmp_path, name)


@pytest.mark.parametrize(
    ("path", "closed"),
    [
        ("a.jsonl", "a.jsonl"),
        ("a.parquet", "a.parquet"),
        ("*.jsonl", "a.jsonl"),
        ("folder/a.csv", "folder"),
        ("a.jsonl", "."),
        ("*.jsonl", "."),
    ],
)
def test_a_file_that_may_not_be_read_is_named(path: str, closed: str) -> None:
    with TemporaryDirectory() as name:  # everybody may enter those above it, unlike tmp_path's
        root = Path(name)
        (root / "folder").mkdir()
        for file in ("a.jsonl", "b.jsonl", "folder/a.csv"):
            (root / file).write_text('{"prompt": "x"}' if "jsonl" in file else "prompt\nx\n")
        pq.write_table(pa.table({"prompt": ["x"]}), root / "a.parquet")
        assert len(read_rows(spec(path), root=root).table)
        root.chmod(0o755)
        (root / closed).chmod(0o700 if (root / closed).is_dir() else 0o600)
        os.seteuid(65534)
        try:
            told = rf"^{re.escape(str(root))}\S* can't be read by user 65534; `chmod -R a\+rX`"
            with pytest.raises(BadInput, match=told):
                read_rows(spec(path), root=root)
        finally:
            os.seteuid(0)


def test_missing_files_are_named_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(GOOD)
    (tmp_path / "c.txt").write_text(GOOD)
    with pytest.raises(
        BadInput,
        match=r"dataset.files.paths\[0\]: no file 'a.jsonl' in .*; the folder has b.jsonl, c.txt",
    ):
        load(tmp_path, "a.jsonl")
    with pytest.raises(BadInput, match=r"no file '\*.csv'"):
        load(tmp_path, "*.csv")
    with pytest.raises(BadInput, match=r"c.txt: unknown suffix '.txt'; set dataset.files.format"):
        load(tmp_path, "c.txt")
    load(tmp_path, "c.txt", format="JSONL")
    with pytest.raises(BadInput, match=r"no file .* the folder has nothing"):
        load(tmp_path / "absent", "a.jsonl")


def test_files_must_agree_on_types(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "answer": "2"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "y", "answer": 2}\n')
    with pytest.raises(
        BadInput, match=r"a column has different types in a.jsonl, b.jsonl: .*answer"
    ):
        load(tmp_path, "*.jsonl")


def test_duplicates_fail_if_asked_to(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        f"{GOOD}\n" + '{"prompt": "x", "answer": "2"}\n' + f"{GOOD}\n"
    )
    expected = (
        r"a.jsonl line 3, column 'prompt': the same prompt as a.jsonl line 1, column "
        r"'prompt'; see dataset.onDupl"
    )
    with pytest.raises(BadInput, match=expected):
        load(tmp_path, "a.jsonl", onDuplicatePrompt="Fail")


def test_too_few_prompts_for_one_generation(tmp_path: Path) -> None:
    """TRL would take no step at all, and succeed."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "short"}\n{"prompt": "rather long"}\n')
    training = TrainingSpec(prompts_per_step=2, num_generations=4, max_prompt_length=8)
    with pytest.raises(
        BadInput,
        match=r"1 prompts are left \(1 dropped as too long\), fewer than the 2 of one generation",
    ):
        load(tmp_path, "a.jsonl", training)
    two_steps = training.model_copy(update={"max_prompt_length": 16, "generation_batch_size": 16})
    with pytest.raises(BadInput, match=r"fewer than the 4 of one generation"):
        load(tmp_path, "a.jsonl", two_steps)


def test_renaming_faults(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "answer": "2"}')
    for columns, message in {
        (
            "solution",
            "result",
        ): (
            r"dataset.columns\[solution\]: the dataset has no column 'result'; it has prompt, "
            r"answer"
        ),
        (
            "answer",
            "prompt",
        ): r"dataset.columns\[answer\]: the dataset has a column of this name already",
    }.items():
        with pytest.raises(BadInput, match=message):
            load(tmp_path, "a.jsonl", columns=dict([columns]))
    with pytest.raises(BadInput, match=r"dataset.columns gives one column two names"):
        load(tmp_path, "a.jsonl", columns={"a": "answer", "b": "answer"})


def test_ranks_that_read_other_rows_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank trains on its part of a group, and would have another prompt there."""
    (tmp_path / "a.jsonl").write_text(GOOD)
    load(tmp_path, "a.jsonl")
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine, "other", mine, "more"])
    with pytest.raises(BadInput, match="ranks 1, 3 read other rows than rank 0"):
        load(tmp_path, "a.jsonl")
