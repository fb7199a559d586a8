"""Holds the memory model against fake-tensor accounts of whole models, and against other estimators.

    python -m benchmarks.memory_truth [--quick]

Prints a table per case (error of each phase and of the total peak) and a summary, in Markdown, for
docs/memory-model.md. Takes seconds to minutes per case, and far more on a busy machine; never part of the tests.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

from grpo_planner import catalogue
from grpo_planner.shapes import Shape
from tests.trainer.accounting import account
from tests.trainer.fake_models import Case, Precision
from tests.trainer.test_memory_truth import CASES, counted, predicted

WHOLE = [
    ("qwen2.5-0.5b", "qwen2"), ("qwen2.5-1.5b", "qwen2"), ("qwen3-0.6b", "qwen3"), ("llama-3.2-1b", "llama"),
    ("smollm2-360m", "llama"), ("gemma-3-270m", "gemma3_text"), ("mistral-7b", "mistral"), ("phi-4-mini", "phi3"),
]  # fmt: skip
GIB = 2**30


def sweep(quick: bool) -> Iterator[Case]:
    """Whole models: both trained ways, two precisions, with and without checkpointing."""
    if quick:
        yield from CASES[:4]
        return
    for name, family in WHOLE:
        shape: Shape = catalogue.shapes()[name]
        precisions: list[Precision] = ["bfloat16", "mixed"]
        for precision in precisions:
            for rank in (0, 16):
                for checkpointing in (True, False):
                    yield Case(name, family, shape, precision, 4, 256, 512, checkpointing, rank, False, 16)


def sixteen_bytes(case: Case) -> float:
    """The rule of thumb for float32 AdamW: 16 bytes per trained parameter, 4 or 2 per frozen one."""
    trained = case.shape.adapter_parameters(case.lora_rank) if case.lora_rank else case.shape.parameters
    frozen = case.shape.parameters if case.lora_rank else 0
    return 16 * trained + frozen * (2 if case.precision == "bfloat16" else 4)


def main() -> None:
    """Prints the table and its summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="four small cases")
    cases = list(sweep(parser.parse_args().quick))
    print("| case | peak GiB | accumulation off | on | 16 B/parameter | seconds |\n|---|---|---|---|---|---|")
    errors: list[float] = []
    rule: list[float] = []
    for case in cases:
        began = time.perf_counter()
        truth = account(case)
        pair = [100 * (predicted(case, steps).peak / counted(truth, steps) - 1) for steps in (1, 2)]
        rough = 100 * (sixteen_bytes(case) / counted(truth, 2) - 1)
        errors += pair
        rule.append(rough)
        print(
            f"| {case.name} | {counted(truth, 2) / GIB:.2f} | {pair[0]:+.2f} % | {pair[1]:+.2f} % | {rough:+.0f} % | "
            f"{time.perf_counter() - began:.0f} |",
            flush=True,
        )
    size = [abs(error) for error in errors]
    print(f"\n{len(errors)} peaks: median {statistics.median(size):.2f} %, largest {max(size):.2f} %; ", end="")
    print(f"16 B/parameter: median {statistics.median(abs(one) for one in rule):.0f} %")


if __name__ == "__main__":
    main()
