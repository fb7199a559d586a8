"""Live ledgers of real trainers on several ranks, case by case."""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from trl.kernels import chunked_logprob

from grpo_acceptance.tiny_model import save_tiny
from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.gang import ranks
from grpo_trainer.training.trl_config import deepspeed_config

from ..ranks import runs
from . import ledger_sites
from .ledger_cases import COMPLETION, Case
from .live_ledger import LiveLedger
from .staged_collectives import stage_collectives


def ledgers(folder: Path, cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of each of `cases` peaks by phase and memory, and unknown sites. Collective."""
    warnings.simplefilter("ignore")
    stage_collectives()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
        "1"  # the profiler doesn't see what transformers' threads allocate
    )
    numbered = enumerate(Case(**case) for case in cases)
    return {"cases": [_ledger(folder / str(number), case) for number, case in numbered]}


def _ledger(folder: Path, case: Case) -> dict[str, Any]:
    """A run of two steps, and what saving the model takes."""
    model = folder / "model"
    if ranks.rank() == 0:
        save_tiny(model, case.config)
    ranks.gather(0)
    runs.reset()
    job = plan(model, case)
    table = ledger_sites.Table(offload=case.offload)
    ledger = LiveLedger(table)
    with ledger.recording(), as_on_a_gpu():
        trainer = runs.build(job, output_dir=str(folder), save_strategy="no", **overrides(job))
        follow(trainer, ledger)
        trainer.train()
        ledger.phase("save")
        trainer.write_model(str(folder / "saved"))
        ledger.phase(None)
        del trainer
    runs.reset()
    return {"peaks": ledger.peaks(), "unknown": dict(table.unknown)}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Only scored positions pass the head, as with Triton, a block of words at a time, with sums
    in float32 beside narrow factors; what is copied to the host is a copy; and products take no
    memory of their own, as oneDNN's do for reordered matrices."""
    with ExitStack() as stack:
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(mock.patch("trl.trainer.utils._use_triton", return_value=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "cpu", copied_to_the_host))
        for name in ("_forward_tile", "_backward_tile"):
            fold = in_blocks(getattr(chunked_logprob, name))
            stack.enter_context(mock.patch.object(chunked_logprob, name, fold))
        stack.enter_context(mock.patch.object(chunked_logprob, "_addmm_fp32", add_product))
        yield


WORDS = 256
"""Words of a block, whose float32 copies are few bytes for the few tokens of a case."""


def in_blocks(fold: Any) -> Any:
    """A tile's fold as Triton does it: the statistics run on from block to block, and none needs
    room of its own."""
    names = list(inspect.signature(fold).parameters)
    first, width = names.index("vocab_start"), names.index("n_cols")

    def folded(tile: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        start, columns = arguments[first - 1], arguments[width - 1]
        for offset in range(0, columns, WORDS):
            block = tile[:, offset : offset + WORDS]
            of_block = list(arguments)
            of_block[first - 1], of_block[width - 1] = start + offset, block.shape[1]
            fold(block, *of_block, **settings)

    return folded


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right` in float32 without float32 copies of both, as cuBLAS does it."""
    for start in range(0, len(right), WORDS):
        block = slice(start, start + WORDS)
        total.addmm_(left[:, block].float(), right[block].float())


def copied_to_the_host(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """`tensor.cpu()` of a GPU's tensor."""
    return tensor.clone()


def overrides(job: TrainingPlan) -> dict[str, Any]:
    """DeepSpeed's settings as they are on GPUs."""
    if not job.execution.zero_stage:
        return {}
    settings = deepspeed_config(job.execution)
    zero = settings["zero_optimization"]
    zero["overlap_comm"] = True
    if "offload_optimizer" in zero:
        zero["offload_optimizer"]["pin_memory"] = True
    return {"deepspeed": settings}


def plan(model: Path, case: Case) -> TrainingPlan:
    """The plan of a case."""
    group = 2
    execution = {
        "microBatch": case.micro_batch, "gradientAccumulation": case.accumulation,
        "stepsPerGeneration": case.accumulation, "gatherForGeneration": case.gather,
        "dtype": "float32" if case.precision == "float32" else "bfloat16",
        "gradientCheckpointing": case.checkpointing, "offload": "CPU" if case.offload else "None",
    }  # fmt: skip
    training = {
        "maxSteps": 2, "numGenerations": group, "maxCompletionLength": COMPLETION,
        "promptsPerStep": case.world * case.accumulation * case.micro_batch // group,
    } | ({} if case.reference == "None" else {"beta": 0.1})  # fmt: skip
    adapter = {"rank": case.lora_rank} if case.lora_rank else {}
    execution["method"] = "LoRA" if case.lora_rank else "Full"
    return runs.plan(
        model,
        case.reference,
        case.zero,
        case.world,
        execution=execution,
        training=training,
        adapter=adapter,
    )


def follow(trainer: Any, ledger: LiveLedger) -> None:
    """The trainer's phases are the ledger's."""
    enter = trainer.observer.clock.enter

    def entered(phase: str | None) -> Any:
        ledger.phase(phase)
        return enter(phase)

    trainer.observer.clock.enter = entered
