"""`grpo verify`: whatever is done to an exported model is found and named."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.provenance import signing
from grpo_api.provenance.provenance import ENVELOPE_FILE, STATEMENT_FILE
from tests.exported_model import FILES, KEYS, public, verify, write
from tests.generated import cases

KEY = KEYS["Ed25519"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", key=KEY)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return public(tmp_path / "public.pem", KEY)


@pytest.mark.parametrize("kind", KEYS)
def test_what_was_exported_and_signed_is_told(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "model", key=KEYS[kind])
    given_key = public(tmp_path / "public.pem", KEYS[kind])
    assert verify(folder, "--key", given_key) == 0
    told = capsys.readouterr().out
    assert "4, 2,307 bytes: all there, none changed, none added" in told
    assert f"by the given key, {signing.key_id(KEYS[kind].public_key())}" in told
    assert "team/demo, uid 1-2" in told
    assert "2 × Error at step 4" in told
    assert "began at step 4 and exported the model" in told
    assert "Clone, moved 2 times, last after step 6 (every 3 steps, mixup 0.6)" in told


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_hash_is_printed_whole(
    model: Path, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert verify(model) == 0
    hashes = re.findall(r"sha256:\w+", capsys.readouterr().out)
    assert {len(each) for each in hashes} == {len("sha256:") + 64}


def test_what_nobody_signed_says_so(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "unsigned")
    assert verify(folder) == 0
    assert (
        "by nobody: a person who changes a file can change its hash, too" in capsys.readouterr().out
    )
    assert verify(folder, "--key", key) == 1
    assert f"{ENVELOPE_FILE} is missing: the model is not signed" in capsys.readouterr().err


Change = Callable[[Path], str]
"""Does something to a model; returns the line that must name it."""
NAMES = st.sampled_from([name for name in FILES if FILES[name]])


def _flip(name: str, at: int, bit: int) -> Change:
    def change(folder: Path) -> str:
        content = bytearray((folder / name).read_bytes())
        content[at % len(content)] ^= 1 << bit
        (folder / name).write_bytes(content)
        return f"{name} was changed"

    return change


def _truncate(name: str, at: int) -> Change:
    def change(folder: Path) -> str:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: at % len(content)])
        return f"{name} was changed"

    return change


def _remove(name: str) -> Change:
    def change(folder: Path) -> str:
        (folder / name).unlink()
        return f"{name} is missing"

    return change


def _rename(name: str, other: str) -> Change:
    def change(folder: Path) -> str:
        (folder / name).rename(folder / other)
        return f"{other} was added"

    return change


def _add(name: str) -> Change:
    def change(folder: Path) -> str:
        (folder / "deeper" / "still").mkdir(parents=True)
        (folder / "deeper" / "still" / name).write_text("")
        return f"deeper/still/{name} was added"

    return change


def _link(name: str) -> Change:
    def change(folder: Path) -> str:
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")
        return f"{name} is a link or no file"

    return change


def _link_folder(name: str) -> Change:
    def change(folder: Path) -> str:
        (folder / name).symlink_to(folder / "tokenizer")
        return f"{name} was added"

    return change


def _pipe(name: str) -> Change:
    def change(folder: Path) -> str:
        (folder / name).unlink()
        os.mkfifo(folder / name)
        return f"{name} is a link or no file"

    return change


def _swap(first: str, second: str) -> Change:
    def change(folder: Path) -> str:
        (folder / first).rename(folder / "third")
        (folder / second).rename(folder / first)
        (folder / "third").rename(folder / second)
        return f"{first} was changed"

    return change


NEW = st.text("abcxyz0189._-", min_size=1, max_size=8).filter(
    lambda name: name.strip(".") and name not in FILES
)
CHANGES = st.one_of(
    st.builds(_flip, NAMES, st.integers(0, 9999), st.integers(0, 7)),
    st.builds(_truncate, NAMES, st.integers(0, 9999)),
    st.builds(_remove, st.sampled_from(list(FILES))),
    st.builds(_rename, st.sampled_from(list(FILES)), NEW),
    st.builds(_add, NEW),
    st.builds(_link, st.sampled_from(list(FILES))),
    st.builds(_link_folder, NEW),
    st.builds(_pipe, st.sampled_from(list(FILES))),
    st.builds(_swap, st.just("config.json"), st.just("model.safetensors")),
)


@given(CHANGES, st.booleans())
@settings(max_examples=cases(120))
def test_whatever_is_done_to_a_file_is_named(change: Change, with_key: bool) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        folder = write(Path(place) / "model", key=KEY)
        lines: list[str] = []
        given_key = public(Path(place) / "public.pem", KEY)
        expected = change(folder)
        patch.setattr(sys.stderr, "write", lines.append)
        assert verify(folder, *(["--key", given_key] if with_key else [])) == 1
    assert any(line.startswith(f"grpo: {expected}") for line in lines), lines


def test_every_file_that_differs_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text("[]")
    (model / "a b.txt").unlink()
    (model / "\x1b[2Jnew").write_text("")
    assert verify(model) == 1
    assert [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()] == [
        "\N{REPLACEMENT CHARACTER}[2Jnew was added",
        "a b.txt is missing",
        "config.json was changed",
        "this is not the model that was exported",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=9,
)


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()), st.booleans())
@settings(max_examples=cases(60))
def test_documents_of_any_content_are_refused_with_a_sentence(content: bytes, signed: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "model", {"config.json": b"{}"}, KEY)
        (folder / (ENVELOPE_FILE if signed else STATEMENT_FILE)).write_bytes(content)
        if not signed:
            (folder / ENVELOPE_FILE).unlink()
        assert verify(folder) == 1


FIELDS = st.sampled_from(
    [
        ("predicateType", "https://slsa.dev/provenance/v0.2"),
        ("_type", "https://in-toto.io/Statement/v0.1"),
        ("subject", [{"name": "config.json", "digest": {"sha256": "00" * 32}}] * 2),
        ("subject", [{"name": "config.json", "digest": {"sha256": "short"}}]),
        ("subject", [{"name": "", "digest": {"sha256": "00" * 32}}]),
        ("predicate", {}),
    ]
)


@given(FIELDS)
def test_a_statement_of_another_kind_is_refused(field: tuple[str, object]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "model")
        path = folder / STATEMENT_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | dict([field])))
        assert verify(folder) == 1


def test_names_that_lead_out_of_the_folder_are_missing_and_never_opened(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / ENVELOPE_FILE).unlink()
    os.mkfifo(model.parent / "pipe")  # who opened it would wait for ever
    path = model / STATEMENT_FILE
    said = json.loads(path.read_text())
    said["subject"] += [
        {"name": name, "digest": {"sha256": "00" * 32}} for name in ("../pipe", "/dev/stdin")
    ]
    path.write_text(json.dumps(said))
    assert verify(model) == 1
    assert capsys.readouterr().err.count("is missing") == 2


def test_what_a_newer_trainer_adds_is_no_fault(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    path = folder / STATEMENT_FILE
    said = json.loads(path.read_text())
    said["more"] = said["predicate"]["more"] = said["subject"][0]["digest"]["blake3"] = "1"
    path.write_text(json.dumps(said))
    assert verify(folder) == 0


def test_a_copy_of_the_hub_s_has_files_that_may_be_ignored(
    model: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / ".cache" / "huggingface").mkdir(parents=True)
    (model / ".cache" / "huggingface" / "x.lock").write_text("")
    (model / ".gitattributes").write_text("")
    assert verify(model, "--key", key) == 1
    assert verify(model, "--key", key, "--ignore", ".cache/*", "--ignore", ".gitattributes") == 0
    (model / "config.json").write_text("[]")
    capsys.readouterr()
    assert verify(model, "--key", key, "--ignore", "*") == 1
    assert "config.json was changed" in capsys.readouterr().err


def test_an_export_without_provenance_is_not_taken(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / STATEMENT_FILE).unlink()
    assert verify(model) == 1
    (model / STATEMENT_FILE).symlink_to(ENVELOPE_FILE)
    assert verify(model) == 1
    told = capsys.readouterr().err
    assert "provenance.json is missing: nothing says what the model should be" in told
    assert "provenance.json is a link or no file" in told


def test_a_file_as_long_as_no_provenance_is_not_read(model: Path) -> None:
    with (model / STATEMENT_FILE).open("ab") as file:
        file.truncate(2**40)
    assert verify(model) == 1


def test_what_is_no_folder_is_another_code(tmp_path: Path) -> None:
    assert verify(tmp_path / "nothing") == 2


def test_a_model_stays_genuine_wherever_it_is_copied(
    model: Path, key: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    assert verify(tmp_path / "copy", "--key", key) == verify(tmp_path / "link", "--key", key) == 0
