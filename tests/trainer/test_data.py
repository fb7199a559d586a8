"""load_prompts: what becomes of rows of every source, by hand-computed cases.

A row that is silently changed or lost changes what is trained.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.contract import DATASET_TOKEN_ENV
from grpo_trainer.data.dataset import load_prompts, prompt_lengths, read_rows
from grpo_trainer.data.row_sources import _rows_of_part, dataset_repository, read_hub
from grpo_trainer.hub.repositories import Hub
from grpo_trainer.runtime.errors import BadInput

TRAINING = TrainingSpec(prompts_per_step=1, num_generations=2)
GSM8K_ROWS = Path(__file__).parent / "data" / "gsm8k-format.jsonl"


def spec(*paths: str, **fields: Any) -> DatasetSpec:
    files = {
        "configMap": {"name": "data"},
        "paths": list(paths),
        "format": fields.pop("format", "Auto"),
    }
    return DatasetSpec.model_validate({"files": files, **fields})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_text_prompts_stay_text_and_keep_the_other_columns(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}]
    )
    prompts = load_prompts(spec("a.jsonl"), TRAINING, tiny_tokenizer(), root=tmp_path)
    assert list(prompts.rows) == [{"answer": 2, "prompt": "1+1="}, {"answer": 4, "prompt": "2+2="}]
    assert (prompts.num_dropped, prompts.num_duplicates) == (0, 0)


def test_first_rows_of_a_parquet_file_with_categories_come_from_several_row_groups(
    tmp_path: Path,
) -> None:
    levels = pa.array(["easy", "hard"] * 50).dictionary_encode()
    table = pa.table({"prompt": [f"{number}+1=" for number in range(100)], "level": levels})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    rows = read_rows(spec("a.parquet"), root=tmp_path, most_rows=25)
    assert len(rows.table) == 25
    assert not rows.is_whole


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_column_that_begins_after_the_first_rows_is_null_there(kind: str, tmp_path: Path) -> None:
    late = datasets.Dataset.from_dict({"prompt": ["c"], "answer": [3]})
    write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "hint": 1}]
    )
    getattr(late, f"to_{kind}".removesuffix("l"))(tmp_path / f"b.{kind}")
    dataset = spec("a.jsonl", f"b.{kind}", columns={"solution": "answer"})
    for most_rows in (1, 2, 3):
        rows = read_rows(dataset, root=tmp_path, most_rows=most_rows)
        first = {"prompt": "a", "hint": None, "solution": None}
        assert (rows.table[0], len(rows.table), rows.is_whole) == (first, most_rows, False)


def test_what_a_newer_version_of_datasets_wrote_of_the_features_is_not_read(tmp_path: Path) -> None:
    features = {"prompt": {"dtype": "string", "_type": "Value"}, "answer": {"_type": "New"}}
    table = pa.table({"prompt": ["a"], "answer": ["1"]})
    for number, text in enumerate((json.dumps({"info": {"features": features}}), "{")):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), path)
        rows = read_rows(spec(path.name), root=tmp_path)
        assert list(rows.table) == [{"prompt": "a", "answer": "1"}]


def test_a_system_prompt_turns_text_into_a_chat(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1=", "answer": "2"}])
    dataset = spec("a.jsonl", promptColumn="question", systemPrompt="Count.")
    rows = load_prompts(dataset, TRAINING, tiny_tokenizer(), root=tmp_path).rows
    assert rows[0]["prompt"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "1+1="},
    ]
    assert rows.column_names == ["question", "answer", "prompt"]


def test_chats_get_the_system_prompt_in_front(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?"},
    ]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat}])
    rows = load_prompts(
        spec("a.jsonl", systemPrompt="Count."), TRAINING, tiny_tokenizer(), root=tmp_path
    ).rows
    assert rows[0]["prompt"] == [{"role": "system", "content": "Count."}, *chat]


@pytest.mark.parametrize(
    ("limit", "kept"), [(4, ["abcd"]), (5, ["abcd", "abcde"]), (6, ["abcd", "abcde", "abcdef"])]
)
def test_prompts_over_the_limit_are_dropped_and_counted(
    tmp_path: Path, limit: int, kept: list[str]
) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "abcd"}, {"prompt": "abcde"}, {"prompt": "abcdef"}]
    )
    training = TrainingSpec(prompts_per_step=1, num_generations=2, max_prompt_length=limit)
    prompts = load_prompts(spec("a.jsonl"), training, tiny_tokenizer(), root=tmp_path)
    assert prompts.rows["prompt"][:] == kept
    assert prompts.num_dropped == 3 - len(kept)
    assert prompts.counts == {
        "prompts": len(kept),
        "prompts_dropped": prompts.num_dropped,
        "prompts_duplicate": 0,
    }
    assert prompts.dropped_message == (
        f"; {prompts.num_dropped} of 3 prompts were dropped as too long"
        if prompts.num_dropped
        else ""
    )


def test_the_chat_template_counts_towards_the_limit(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "abcd"}])
    dataset = spec("a.jsonl", systemPrompt="xy", onLongPrompt="Fail")
    tokens = len("xy") + len("abcd") + 3  # system, user and assistant markers
    fits = TrainingSpec(prompts_per_step=1, num_generations=2, max_prompt_length=tokens)
    assert len(load_prompts(dataset, fits, tiny_tokenizer(), root=tmp_path).rows) == 1
    too_short = TrainingSpec(prompts_per_step=1, num_generations=2, max_prompt_length=tokens - 1)
    with pytest.raises(
        BadInput,
        match=r"a.jsonl line 1, column 'prompt': 9 tokens, more than training.maxPromptLength 8",
    ):
        load_prompts(dataset, too_short, tiny_tokenizer(), root=tmp_path)


@pytest.mark.parametrize(("rule", "left"), [("Keep", ["a", "b", "a", "a"]), ("Drop", ["a", "b"])])
def test_duplicates_are_counted(tmp_path: Path, rule: str, left: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in "abaa"])
    prompts = load_prompts(
        spec("a.jsonl", onDuplicatePrompt=rule), TRAINING, tiny_tokenizer(), root=tmp_path
    )
    assert prompts.rows["prompt"][:] == left
    assert (prompts.num_duplicates, prompts.num_dropped) == (2, 0)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": 'Say "hi", then stop', "answer": "hi"},
        {"prompt": "two\nlines", "answer": "ä"},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(
        'prompt,answer\n"Say ""hi"", then stop",hi\n"two\nlines",ä\n', encoding="utf-8"
    )
    loaded = [
        load_prompts(spec(name), TRAINING, tiny_tokenizer(), root=tmp_path)
        for name in ("a.jsonl", "a.parquet", "a.csv")
    ]
    assert [list(prompts.rows) for prompts in loaded] == [
        [{"answer": row["answer"], "prompt": row["prompt"]} for row in rows]
    ] * 3
    assert len({prompts.fingerprint for prompts in loaded}) == 1


def test_blank_lines_of_csv_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\nprompt,answer\na,1\n\nb,2\n\n")
    rows = load_prompts(spec("a.csv"), TRAINING, tiny_tokenizer(), root=tmp_path).rows
    assert rows["answer"][:] == ["1", "2"]


def test_a_cell_of_csv_may_be_long(tmp_path: Path) -> None:
    long = "x, " * 100_000
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{long}",1\nb,2\n')
    training = TRAINING.model_copy(update={"max_prompt_length": 2**20})
    rows = load_prompts(spec("a.csv"), training, tiny_tokenizer(), root=tmp_path).rows
    assert rows["prompt"][:] == [long, "b"]


@pytest.mark.parametrize(("token", "sent"), [("s3cret\n", "s3cret"), (" \n", None), ("", None)])
def test_the_newline_at_the_end_of_a_token_is_not_sent(
    token: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATASET_TOKEN_ENV, token)
    assert dataset_repository(DatasetSpec(name="openai/gsm8k")).token == sent


def test_files_are_read_in_order_and_wildcards_by_name(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name, text in {"more/b.jsonl": "2", "more/a.jsonl": "1", "z.jsonl": "0"}.items():
        write_jsonl(tmp_path / name, [{"prompt": text}])
    rows = load_prompts(
        spec("z.jsonl", "more/*.jsonl"), TRAINING, tiny_tokenizer(), root=tmp_path
    ).rows
    assert rows["prompt"][:] == ["0", "1", "2"]


def test_a_configmap_s_links_are_followed(tmp_path: Path) -> None:
    """The kubelet mounts a ConfigMap's keys as links into a hidden folder."""
    (tmp_path / "..2026_01").mkdir()
    write_jsonl(tmp_path / "..2026_01" / "train.jsonl", [{"prompt": "x"}])
    (tmp_path / "..data").symlink_to("..2026_01")
    (tmp_path / "train.jsonl").symlink_to("..data/train.jsonl")
    assert len(load_prompts(spec("*.jsonl"), TRAINING, tiny_tokenizer(), root=tmp_path).rows) == 1


def test_columns_are_renamed_before_all_else(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "1+1=", "prompts": "old", "prompt": "other"}])
    mapping = {"question": "text", "source": "prompts", "theirs": "prompt"}
    dataset = spec("a.jsonl", columns=mapping, promptColumn="question")
    rows = load_prompts(dataset, TRAINING, tiny_tokenizer(), root=tmp_path).rows
    assert rows[0] == {"question": "1+1=", "source": "old", "theirs": "other", "prompt": "1+1="}


def test_the_fingerprint_follows_content_and_mapping(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "1", "answer": "a"}, {"prompt": "2", "answer": "b"}]
    )
    write_jsonl(
        tmp_path / "copy.jsonl", [{"answer": "a", "prompt": "1"}, {"answer": "b", "prompt": "2"}]
    )
    write_jsonl(
        tmp_path / "other.jsonl", [{"prompt": "1", "answer": "a"}, {"prompt": "2", "answer": "c"}]
    )
    write_jsonl(
        tmp_path / "turned.jsonl", [{"prompt": "2", "answer": "b"}, {"prompt": "1", "answer": "a"}]
    )

    def fingerprint(dataset: DatasetSpec) -> str:
        return load_prompts(dataset, TRAINING, tiny_tokenizer(), root=tmp_path).fingerprint

    base = fingerprint(spec("a.jsonl"))
    assert base == fingerprint(spec("copy.jsonl"))
    changed = [
        spec("other.jsonl"),
        spec("turned.jsonl"),
        spec("a.jsonl", systemPrompt="x"),
        spec("a.jsonl", columns={"solution": "answer"}),
        spec("a.jsonl", promptColumn="answer"),
    ]
    assert len({base, *map(fingerprint, changed)}) == 1 + len(changed)


def test_hub_datasets_are_loaded_by_name_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes a folder for a hub id: the same call, without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        write_jsonl(
            tmp_path / "set" / f"{split}.jsonl",
            [{"question": f"{split} {n}", "answer": n} for n in range(3)],
        )
    dataset = DatasetSpec(name=str(tmp_path / "set"), split="test", prompt_column="question")
    rows = load_prompts(dataset, TRAINING, tiny_tokenizer()).rows
    assert rows["prompt"][:] == ["test 0", "test 1", "test 2"]
    with pytest.raises(BadInput, match=r"split validation\).*check name, config, split"):
        load_prompts(dataset.model_copy(update={"split": "validation"}), TRAINING, tiny_tokenizer())
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("")
    with pytest.raises(BadInput, match="can't be loaded: Dataset scripts are no longer supported"):
        load_prompts(
            dataset.model_copy(update={"name": str(tmp_path / "script")}),
            TRAINING,
            tiny_tokenizer(),
        )
    with pytest.raises(BadInput, match="can't be loaded"):
        load_prompts(
            dataset.model_copy(update={"name": str(tmp_path / "none")}), TRAINING, tiny_tokenizer()
        )


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_the_first_rows_are_those_that_are_trained_on_whatever_the_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]})
    getattr(whole, f"to_{kind}")(tmp_path / f"test.{kind}")
    dataset = DatasetSpec(name=str(tmp_path), split="test")
    assert read_hub(dataset, Hub())[0].to_list() == whole.to_list()
    first, is_whole = read_hub(dataset, Hub(), most_rows=2)
    assert (first.to_list(), is_whole) == (whole.to_list()[:2], False)


PARTS = st.builds(
    "train[{}:{}]".format,
    st.sampled_from(["", 0, 3, 30, 90, -2, -30, "10%", "50%", "-20%"]),
    st.sampled_from(["", 0, 5, 40, -1, -35, "30%", "80%", "-10%"]),
)


@given(part=PARTS, total=st.integers(1, 120), most=st.integers(1, 120))
def test_the_first_rows_are_in_a_part_of_a_split_whatever_follows(
    part: str, total: int, most: int
) -> None:
    (whole,) = datasets.ReadInstruction.from_spec(part).to_absolute({"train": total})
    trained_on = range(whole.from_, whole.to)
    rows = _rows_of_part(part, min(total, most), most)
    assert list(rows) == [row for row in rows if row in trained_on]
    if total < most:
        assert list(rows) == list(trained_on)


@pytest.mark.parametrize(
    ("split", "is_whole"),
    [
        ("train", True),
        ("train[2:]", True),
        ("train[:50%]", True),
        ("train[2:]+test", False),
        ("all", True),
    ],
)
def test_a_preflight_reads_rows_that_are_trained_on(
    split: str, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for name in ("train", "test"):
        rows = [{"prompt": f"{name} {n}"} for n in range(4)]
        write_jsonl(tmp_path / "set" / f"{name}.jsonl", rows)
    dataset = DatasetSpec(name=str(tmp_path / "set"), split=split)
    whole = read_rows(dataset, root=tmp_path).table["prompt"][:]
    first = read_rows(dataset, root=tmp_path, most_rows=200)
    count = len(first.table)
    assert first.table["prompt"][:] == whole[:count]
    assert first.is_whole == is_whole == (count == len(whole))
    assert count
    beginning = read_rows(dataset, root=tmp_path, most_rows=3)
    assert not beginning.is_whole
    assert beginning.table["prompt"][:] == whole[: len(beginning.table)]


def test_a_part_of_a_split_without_a_row_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    dataset = DatasetSpec(name=str(tmp_path / "set"), split="train[:20%]")
    for most_rows in (None, 200):
        with pytest.raises(BadInput, match=r"^dataset: it has no row; |corresponds to no data"):
            read_rows(dataset, root=tmp_path, most_rows=most_rows)


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv"])
@pytest.mark.parametrize("most_rows", [None, 200])
def test_a_dataset_without_rows_is_bad_input(
    name: str, most_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_text("prompt\n" if name.endswith("csv") else "")
    with pytest.raises(BadInput, match=r"can't be loaded: (it has no row|a file of|.*no data)"):
        read_rows(DatasetSpec(name=str(tmp_path / "set")), root=tmp_path, most_rows=most_rows)


@pytest.mark.parametrize("most_rows", [None, 200])
def test_a_damaged_file_of_a_dataset_is_bad_input_with_its_cause(
    most_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("prompt\na\nb,c\n")
    with pytest.raises(BadInput, match=r"can't be loaded: .*Expected 1 fields in line 3.*; check"):
        read_rows(DatasetSpec(name=str(tmp_path / "set")), root=tmp_path, most_rows=most_rows)


def test_gsm8k_rows_become_chats_with_their_answers(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_bytes(GSM8K_ROWS.read_bytes())
    dataset = spec("gsm8k.jsonl", promptColumn="question", systemPrompt="Think.")
    prompts = load_prompts(dataset, TRAINING, tiny_tokenizer(), root=tmp_path)
    assert len(prompts.rows) == 8
    assert prompts.rows[0]["prompt"][1]["content"].startswith("A baker fills 6 trays")
    assert prompts.rows[2]["answer"].endswith("#### 1,500")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=300))
def test_lengths_are_mean_and_nearest_rank(counts: list[int]) -> None:
    lengths = prompt_lengths(counts, 0)
    assert lengths.mean == pytest.approx(sum(counts) / len(counts))
    assert lengths.p95 in counts
    assert sum(count <= lengths.p95 for count in counts) >= 0.95 * len(counts)
    assert sum(count < lengths.p95 for count in counts) < 0.95 * len(counts)
