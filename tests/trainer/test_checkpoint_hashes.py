"""Shares of hashing, for files and gangs of every size: disjoint, complete, balanced; and no damage
goes unnamed."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.checkpoints import hashing
from grpo_trainer.checkpoints.hashing import (
    CHUNK_BYTES,
    damage,
    digests,
    recorded_parts,
    records,
    share,
    split_into_parts,
)
from grpo_trainer.checkpoints.manifest import FileRecord
from tests.generated import cases

GIB = 2**30
NAMES = st.text("abc/é 0.", min_size=1, max_size=8).filter(
    lambda name: all(part.strip(".") for part in name.split("/"))
)
"""Paths inside a checkpoint: nested, with spaces, in any script."""
WORLDS = st.integers(1, 70)
CHUNK = 8


def written(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files, each in its folders."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def record(folder: Path, sizes: dict[str, int], world: int, chunk: int) -> dict[str, FileRecord]:
    """What the ranks record together."""
    parts = split_into_parts(sizes, chunk)
    hashes = [one for rank in range(world) for one in digests(folder, share(parts, rank, world))]
    return records(sizes, hashes, chunk)


def all_damage(folder: Path, files: dict[str, FileRecord], world: int) -> list[str]:
    """What all ranks find together."""
    return [problem for rank in range(world) for problem in damage(folder, files, rank, world)]


@given(st.dictionaries(NAMES, st.one_of(st.integers(0, 3), st.integers(0, 5000 * GIB))), WORLDS)
@settings(max_examples=cases(100))
def test_shares_are_disjoint_complete_and_balanced_within_a_chunk(
    sizes: dict[str, int], world: int
) -> None:
    chunk = max(CHUNK_BYTES, sum(sizes.values()) // 5000)
    parts = split_into_parts(sizes, chunk)
    for name, size in sizes.items():
        own = [part for part in parts if part.name == name]
        assert [part.begin for part in own] == [0, *(part.end for part in own[:-1])]
        assert own[-1].end == size
    shares = [share(parts, rank, world) for rank in range(world)]
    assert [part for one in shares for part in one] == parts
    mean = sum(sizes.values()) / world
    for one in shares:
        assert abs(sum(part.end - part.begin for part in one) - mean) <= chunk


FILES = st.dictionaries(
    st.text("abcé.", min_size=1, max_size=20).map("file{}".format),
    st.binary(max_size=40),
    min_size=2,
)


def flip(folder: Path, contents: dict[str, bytes], pick: Callable[[int], int]) -> set[str]:
    """A bit of a file with any."""
    name = sorted(contents)[pick(len(contents))]
    if contents[name]:
        bit = pick(8 * len(contents[name]))
        changed = bytearray(contents[name])
        changed[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(changed)
    return {name} if contents[name] else set()


def truncate(folder: Path, contents: dict[str, bytes], pick: Callable[[int], int]) -> set[str]:
    """The end of a file with any."""
    name = sorted(contents)[pick(len(contents))]
    os.truncate(folder / name, pick(len(contents[name]) or 1))
    return {name} if contents[name] else set()


def extend(folder: Path, contents: dict[str, bytes], pick: Callable[[int], int]) -> set[str]:
    """A file with more behind its end."""
    name = sorted(contents)[pick(len(contents))]
    (folder / name).write_bytes(contents[name] + bytes(1 + pick(20)))
    return {name}


def remove(folder: Path, contents: dict[str, bytes], pick: Callable[[int], int]) -> set[str]:
    """No file."""
    name = sorted(contents)[pick(len(contents))]
    (folder / name).unlink()
    return {name}


def swap(folder: Path, contents: dict[str, bytes], pick: Callable[[int], int]) -> set[str]:
    """Two files in each other's place."""
    first, second = sorted(contents)[pick(len(contents))], sorted(contents)[pick(len(contents))]
    (folder / first).write_bytes(contents[second])
    (folder / second).write_bytes(contents[first])
    return {first, second} if contents[first] != contents[second] else set()


@given(FILES, st.sampled_from([flip, truncate, extend, remove, swap]), WORLDS, WORLDS, st.randoms())
@settings(max_examples=cases(100))
def test_every_damage_is_found_and_no_other_file_is_blamed(
    contents: dict[str, bytes],
    fault: Callable[[Path, dict[str, bytes], Callable[[int], int]], set[str]],
    saved_by: int,
    read_by: int,
    random: object,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, contents)
        files = record(
            folder, {name: len(content) for name, content in contents.items()}, saved_by, CHUNK
        )
        assert all_damage(folder, files, read_by) == []
        hit = fault(folder, contents, random.randrange)  # type: ignore[attr-defined]
        problems = all_damage(folder, files, read_by)
        assert {problem.partition(" ")[0] for problem in problems} == hit


def test_a_new_manifest_has_the_quick_hash(tmp_path: Path) -> None:
    written(tmp_path, {"model": b"weights"})
    entry = record(tmp_path, {"model": 7}, 1, CHUNK)["model"]
    assert (entry.algorithm, entry.hashes) == ("xxh3_128", [xxhash.xxh3_128_hexdigest(b"weights")])


def test_a_hash_too_few_or_a_size_that_changed_is_no_manifest_entry() -> None:
    with pytest.raises(ValueError, match="17 bytes in chunks of 8 have 3 hashes, not 2"):
        FileRecord(bytes=17, chunk_bytes=8, hashes=["a", "b"])


def test_a_file_that_another_rank_sees_shorter_is_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "late").write_bytes(b"seen")
    with pytest.raises(OSError, match=r"ends 2 bytes before byte 6: .*late"):
        digests(tmp_path, split_into_parts({"late": 6}))


def test_a_file_that_can_not_be_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, {"file": b"content"})
    files = record(tmp_path, {"file": 7}, 1, CHUNK)
    os.truncate(tmp_path / "file", 6)
    monkeypatch.setattr(
        Path, "stat", lambda _: os.stat_result((0o100644, 0, 0, 0, 0, 0, 7, 0, 0, 0))
    )
    monkeypatch.setattr(hashing, "READ_PAUSES", ())
    assert damage(tmp_path, files) == ["file can't be read: ends 1 bytes before byte 7"]
    assert [part.end for part, _ in recorded_parts(files)] == [7]
