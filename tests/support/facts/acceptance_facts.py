"""What the acceptance run's checks find on a CPU, all in one process whose libraries are already
there.

`python -m grpo_acceptance` starts a process for each; the tests see that with two of them only.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from grpo_acceptance import engine_checks, memory_checks, step_checks, training_checks
from grpo_acceptance.findings import Context, Finding
from harness.controlplane import free_port

TINY = {
    "family": "qwen2",
    "micro_batch": 2,
    "prompt": 8,
    "completion": 24,
    "checkpointing": True,
    "accumulation": 2,
    "generation_batch": 4,
    "config": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""A case of the memory check that a CPU gets through at once; it has no allocator to read."""


def measure(folder: Path) -> dict[str, Any]:
    """Findings by check; `other` are those of a GPU that computes something else."""
    context = Context("cpu", str(folder), port=free_port())
    step_checks.record_cpu_step(context)
    findings: dict[str, list[Finding]] = {
        "step": step_checks.compare_with_cpu(context),
        "kl-zero": step_checks.check_first_kl(context),
        "adamw-8bit": step_checks.check_eight_bit(context),
        "resume": training_checks.check_resume(context),
        "proof": training_checks.check_proof(context),
        "hash": engine_checks.compare_hashes(context),
        "strategies": training_checks.train_strategies(context, 0),
        "no such device": training_checks.train_strategies(replace(context, device="cuda"), 0)[:1],
    }
    disturb(folder / step_checks.CPU_STEPS)
    findings["other"] = step_checks.compare_with_cpu(context)
    cases = [TINY | {"precision": precision, "lora_rank": rank} for precision, rank in MEMORY]
    return {
        "findings": {name: [asdict(one) for one in rows] for name, rows in findings.items()},
        "phases": [sorted(memory_checks.Run(case, "cpu").measure_peaks()) for case in cases],
    }


MEMORY = (("bfloat16", 0), ("mixed", 0), ("bfloat16", 4))
"""Precision and LoRA rank of the tiny case."""


def disturb(path: Path) -> None:
    """Let the CPU's loss of step 2 be another than it was."""
    recorded = torch.load(path)
    recorded["float32"][0][2]["loss"] += 1.0
    torch.save(recorded, path)
