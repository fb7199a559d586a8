"""Measures how long two ranks hash a checkpoint: shares by bytes with XXH3 against whole files by
name with SHA-256.

Training stands still meanwhile. The second is how checkpoints were hashed at first: one rank had
all of optimizer.pt.

    python -m benchmarks checkpoint_hash [--gib 1.5] [--rounds 3]

Writes files like those of a run whose model has a third of these bytes, hashes them in turn both
ways in two processes, and prints the median seconds until both have ended, of saving and of
verifying, and their ratio.
"""

import argparse
import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from grpo_api.text.units import GIB, MIB
from grpo_trainer.checkpoints.hashing import (
    damage,
    digests,
    list_files,
    records,
    share,
    split_into_parts,
)
from grpo_trainer.checkpoints.manifest import FileRecord

WORLD = 2


def write(folder: Path, size: int) -> None:
    """A checkpoint's files, `size` bytes together: the optimizer's state is two thirds."""
    shares = {
        "model.safetensors": size // 3,
        "optimizer.pt": size - size // 3,
        "rng_state_0.pth": 14_000,
    }
    noise = bytes(hashlib.shake_128(b"").digest(MIB))
    for name, length in shares.items():
        with (folder / name).open("wb") as file:
            for _ in range(length // MIB):
                file.write(noise)
            file.write(noise[: length % MIB])


def by_bytes(folder: Path, rank: int) -> None:
    """What a rank does for the manifest."""
    digests(folder, share(split_into_parts(list_files(folder)), rank, WORLD))


def by_name(folder: Path, rank: int) -> None:
    """What a rank did at first."""
    for name in sorted(list_files(folder))[rank::WORLD]:
        with (folder / name).open("rb") as file:
            hashlib.file_digest(file, "sha256")


def verified(files: dict[str, FileRecord]) -> Callable[[Path, int], None]:
    """What a rank does on resume."""

    def verify(folder: Path, rank: int) -> None:
        assert not damage(folder, files, rank, WORLD)

    return verify


def seconds(action: Callable[[Path, int], None], folder: Path) -> float:
    """Time until all ranks are done, without the start of their processes."""
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(WORLD + 1)

    def work(rank: int) -> None:
        ready.wait()
        action(folder, rank)

    processes = [context.Process(target=work, args=(rank,)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    ready.wait()
    begin = time.perf_counter()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, int(arguments.gib * GIB))
        sizes = list_files(folder)
        files = records(sizes, digests(folder, split_into_parts(sizes)))
        ways = {
            "by bytes, XXH3": by_bytes,
            "by name, SHA-256": by_name,
            "verified on resume": verified(files),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, action in ways.items():
                times[way].append(seconds(action, folder))
    medians = {way: statistics.median(values) for way, values in times.items()}
    for way, median in medians.items():
        print(f"{way:20} {median:6.2f} s  {arguments.gib / median:6.2f} GiB/s")
    first, second, _ = medians.values()
    print(f"ratio {second / first:.1f}")
