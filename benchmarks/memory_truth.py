"""Compares the memory model with fake-tensor accounts of whole models, and with other estimators.

    python -m benchmarks memory_truth [--quick] [--models NAME ...]

Prints a table per case (error of the total peak, by this model and by others' rules) and a summary,
in Markdown, for docs/internals/memory-model.md. Takes seconds to minutes per case, and far more on
a busy machine; never part of the tests.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from grpo_api.text.units import GIB
from grpo_planner.memory.setup import Precision
from grpo_planner.model import catalogue
from tests.support.ledger.accounting import account
from tests.support.ledger.fake_models import Case
from tests.support.ledger.memory_cases import CASES, counted, predicted

WHOLE = {
    "qwen2.5-0.5b": "qwen2", "qwen2.5-1.5b": "qwen2", "qwen3-0.6b": "qwen3",
    "smollm2-360m": "llama",
    "llama-3.2-1b": "llama", "gemma-3-1b": "gemma3_text", "smollm2-1.7b": "llama",
    "phi-4-mini": "phi3",
    "mistral-7b": "mistral",
}  # fmt: skip


def sweep(models: Iterable[str]) -> Iterator[Case]:
    """Whole models: both trained ways, two precisions, with and without checkpointing."""
    precisions: list[Precision] = ["bfloat16", "mixed"]
    for name in models:
        for precision in precisions:
            for rank in (0, 16):
                for checkpointing in (True, False):
                    yield Case(
                        model=name, family=WHOLE[name], shape=catalogue.shapes()[name],
                        precision=precision,
                        micro_batch=4, prompt=256, completion=512, checkpointing=checkpointing,
                        lora_rank=rank,
                        generation_batch=16,
                    )  # fmt: skip


def sixteen_bytes(case: Case) -> float:
    """The rule of thumb for float32 AdamW: 16 bytes per trained parameter, 4 or 2 per frozen
    one."""
    trained = (
        case.shape.adapter_parameters(case.lora_rank) if case.lora_rank else case.shape.parameters
    )
    frozen = case.shape.parameters if case.lora_rank else 0
    return 16 * trained + frozen * (2 if case.precision == "bfloat16" else 4)


def accelerate(case: Case) -> float:
    """`accelerate estimate-memory --dtypes bfloat16`, the row of mixed precision: the largest of
    its components."""
    return float(max(estimate_training_usage(4 * case.shape.parameters, "bfloat16").values()))


def zero2(case: Case) -> float:
    """DeepSpeed's estimate of ZeRO-2 on one GPU without offload."""
    needs = estimate_zero2_model_states_mem_needs(case.shape.parameters, cpu_offload=False)
    return float(needs[1])


def zero3(case: Case) -> float:
    """DeepSpeed's estimate of ZeRO-3 on one GPU without offload."""
    needs = estimate_zero3_model_states_mem_needs(
        case.shape.parameters, case.shape.head, cpu_offload=False
    )
    return float(needs[1])


OTHERS: dict[str, Callable[[Case], float]] = {
    "16 B/parameter": sixteen_bytes, "accelerate": accelerate, "DeepSpeed ZeRO-2": zero2,
    "DeepSpeed ZeRO-3": zero3,
}  # fmt: skip


def summary(name: str, errors: list[float]) -> str:
    """One line: how far off in the median, and both ends."""
    size = [abs(error) for error in errors]
    return (
        f"{name}: {len(errors)} peaks, median {statistics.median(size):.2f} %, largest "
        f"{max(size):.2f} %, "
        f"from {min(errors):+.2f} to {max(errors):+.2f} %"
    )


def main() -> None:
    """Prints the table and its summary; the others' rules only for full training, which they are
    made for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four small cases")
    parser.add_argument(
        "--models", nargs="+", choices=WHOLE, default=list(WHOLE), help="which whole models"
    )
    arguments = parser.parse_args()
    print("| case | peak GiB | accumulation off | on | " + " | ".join(OTHERS) + " | seconds |")
    print("|---" * (5 + len(OTHERS)) + "|")
    errors: dict[str, list[float]] = {"this model": [], **{name: [] for name in OTHERS}}
    for case in CASES[:4] if arguments.quick else sweep(arguments.models):
        began = time.perf_counter()
        truth = account(case)
        pair = [100 * (predicted(case, steps).peak / counted(truth, steps) - 1) for steps in (1, 2)]
        errors["this model"] += pair
        cells = [
            f"{case.name}",
            f"{counted(truth, 2) / GIB:.2f}",
            *(f"{error:+.2f} %" for error in pair),
        ]
        for name, rule in OTHERS.items():
            error = 100 * (rule(case) / counted(truth, 2) - 1)
            errors[name] += [] if case.lora_rank and name != "16 B/parameter" else [error]
            cells.append(f"{error:+.0f} %")
        print("| " + " | ".join(cells) + f" | {time.perf_counter() - began:.0f} |", flush=True)
    print("\n" + "\n".join(summary(name, found) for name, found in errors.items()))
