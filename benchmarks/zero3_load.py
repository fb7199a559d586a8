"""Host memory and time of loading and proving a model of about 1 GB under ZeRO-3 on two ranks.

A load that puts the whole model on every rank kills nodes (230 GB per rank has been seen), and a
proof that costs as much as the load would be switched off.

    python -m benchmarks zero3_load [--default-malloc] [--layers 12] [--write]

Prints, per rank, anonymous memory over the start: its peak while loading against `shards + 3 x
largest module + 64 MiB`, what stays against `1.15 x shards`, the peak while proving, and the
proof's time against 8 % of the load's. Exits 1 where a bound is broken.
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.pages import STRATEGIES, replace_section, table
from grpo_api.text.units import MIB
from tests.support.ranks.gang import run_gang

WORLD = 2
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc gives freed buffers back at once instead of keeping them: trainer_image sets the same."""


class Peak:
    """Highest anonymous and file-backed memory of this process while inside, sampled every 2 ms;
    bytes."""

    def __enter__(self) -> "Peak":
        self.anon = self.file = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.anon = max(self.anon, resident("RssAnon"))
            self.file = max(self.file, resident("RssFile"))


def resident(kind: str) -> int:
    """Bytes of a kind of resident memory (proc(5), status)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise LookupError(kind)


def measure(folder: Path) -> dict[str, Any]:
    """One rank: memory and times of load and proof, after a first small load has paid for lazy
    imports."""
    from grpo_trainer.weights.checkpoint_files import open_weights
    from grpo_trainer.weights.models import load_policy
    from grpo_trainer.weights.parameters import is_partitioned
    from grpo_trainer.weights.proof import prove_weights
    from tests.support.ranks import runs

    jobs = [runs.plan(folder / name, "Sharded", 3, WORLD) for name in ("small", "large")]
    config = runs.configuration(jobs[0], output_dir=str(folder / "output"))
    small, large = jobs
    load_policy(small.model, small.execution, small.adapter)
    base, base_file = resident("RssAnon"), resident("RssFile")
    start = time.perf_counter()
    with Peak() as loading:
        loaded = load_policy(large.model, large.execution, large.adapter)
    seconds = time.perf_counter() - start
    after = resident("RssAnon")
    with Peak() as proving, open_weights(folder / "large") as files:
        proof = prove_weights(loaded.model, files, "policy")
    parameters = list(loaded.model.parameters())
    assert all(is_partitioned(parameter) for parameter in parameters)
    sizes = [module_bytes(module) for module in loaded.model.modules()]
    del config
    return {
        "model": sum(4 * parameter.ds_numel for parameter in parameters),
        "shards": sum(4 * parameter.ds_tensor.numel() for parameter in parameters),
        "largest": max(sizes),
        "peak": loading.anon - base,
        "after": after - base,
        "proving": proving.anon - base,
        "file": loading.file - base_file,
        "load_seconds": seconds,
        "proof_seconds": proof.seconds,
    }


def module_bytes(module: Any) -> int:
    """Bytes of a module's own parameters, without its children's."""
    return sum(4 * parameter.ds_numel for parameter in module.parameters(recurse=False))


def save_models(folder: Path, layers: int) -> None:
    """A small and a large random model; about 1 GB with 12 layers in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

    from grpo_acceptance.tiny_model import tiny_tokenizer
    from tests.support.ranks import demo_model

    demo_model.save_policy(folder / "small")
    set_seed(0)
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "large")
    tiny_tokenizer().save_pretrained(folder / "large")


def rows(ranks: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """What was measured, the value and its bound, per rank."""
    checks = []
    for rank, facts in enumerate(ranks):
        bound = (facts["shards"] + 3 * facts["largest"]) / MIB + 64
        checks += [
            (f"rank {rank}: peak while loading, MiB", facts["peak"] / MIB, bound),
            (
                f"rank {rank}: after loading, MiB",
                facts["after"] / MIB,
                1.15 * facts["shards"] / MIB,
            ),
            (f"rank {rank}: peak while proving, MiB", facts["proving"] / MIB, bound),
            (
                f"rank {rank}: proof / load, %",
                100 * facts["proof_seconds"] / facts["load_seconds"],
                8.0,
            ),
        ]
    return checks


def report(ranks: list[dict[str, Any]]) -> str:
    """The measurements as a Markdown table, with the sizes they refer to."""
    first = ranks[0]
    sizes = ", ".join(
        f"{name} {first[name] / MIB:.0f} MiB" for name in ("model", "shards", "largest")
    )
    file = ", ".join(f"{facts['file'] / MIB:.0f} MiB" for facts in ranks)
    seconds = ", ".join(
        f"{facts['load_seconds']:.2f} and {facts['proof_seconds']:.2f} s" for facts in ranks
    )
    lines = [[name, f"{value:.1f}", f"{limit:.1f}"] for name, value, limit in rows(ranks)]
    about = f"{sizes}; file-backed memory by rank: {file}; load and proof by rank: {seconds}."
    return f"{about}\n\n{table(['measured', 'value', 'bound'], lines)}"


def main() -> int:
    """Saves, measures in fresh processes, reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--default-malloc", action="store_true", help="leave glibc's thresholds as they are"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--write", action="store_true", help="write the table into strategy-measurements.md"
    )
    options = parser.parse_args()
    if not options.default_malloc:
        os.environ |= MALLOC
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder, options.layers)
        facts = run_gang("benchmarks.zero3_load:measure", folder, WORLD, fresh=True)
    text = report(facts)
    print(text)
    if options.write:
        replace_section(STRATEGIES, "load", text)
    return int(any(value > limit for _, value, limit in rows(facts)))
