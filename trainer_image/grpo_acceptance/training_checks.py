"""Checks of short training runs: every reference strategy, resume, and the proof of weights.

Which pairs of strategy and ZeRO stage there are is what the trainer supports; each is a row.

A GPU's kernels may add in another order each time; then no resume can be more alike than the same
run is to itself. So the run is made twice, and a resume may differ by as much as these two do,
which is nothing where kernels are deterministic.
"""

import shutil
from typing import Any

import torch

from grpo_trainer.runtime.errors import WeightsDiffer, classify_error
from grpo_trainer.runtime.paths import attempt_folder_name, checkpoint_folder
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer

from . import trial_runs
from .findings import Context, Finding, make_finding
from .trial_plans import make_plan
from .trial_runs import FinishedRun, largest_difference, nonfinite_problems

STEPS, SAVED = 6, 3


def check_resume(context: Context) -> list[Finding]:
    """A run with a moving reference, the same again, and one that goes on from the first one's
    middle."""
    whole, again = _run_and_save(context, "whole", 1), _run_and_save(context, "again", 1)
    attempt = context.path / "whole" / attempt_folder_name(1)
    shutil.rmtree(checkpoint_folder(attempt, STEPS))
    resumed = _run_and_save(context, "whole", 2)
    noise = largest_difference(whole.steps, again.steps)
    gap = largest_difference(whole.steps, resumed.steps)
    problems = []
    if not resumed.trainer.resumed_from:
        problems.append("it began again from step 0")
    if sorted(resumed.steps) != list(range(SAVED + 1, STEPS + 1)):
        problems.append(f"steps {sorted(resumed.steps)}")
    if not gap <= noise:
        problems.append(f"the resumed run differs by {gap:.2g}, the same run twice by {noise:.2g}")
    measured = f"resumed at step {SAVED}: differs by {gap:g}; the same run twice: by {noise:g}"
    numbers: dict[str, float | str] = {"resumed": gap, "again": noise}
    return [make_finding("checkpoint and resume", problems, measured, numbers)]


def check_proof(context: Context) -> list[Finding]:
    """Policy and reference are proven where they lie, and one bit that is turned there is found."""
    answers: list[str] = []

    def look(trainer: ReferenceGRPOTrainer) -> None:
        trainer.prove("policy", trainer.model)
        trainer.prove("reference", trainer.ref_model)
        parameter = next(trainer.model.parameters())
        answers.append(str(parameter.device.type))
        _flip(parameter)
        try:
            trainer.prove("policy", trainer.model)
        except WeightsDiffer as error:
            answers.append(str(error))
        _flip(parameter)

    ran = trial_runs.run_trial(context, make_plan(context, training={"maxSteps": 1}), look)
    device, *refusals = answers
    problems = []
    if device != context.device:
        problems.append(f"the weights lie on {device}")
    if not refusals:
        problems.append("a turned bit was not found")
    proven = ran.trainer.proofs
    numbers: dict[str, float | str] = {
        "bytes": float(sum(proof.bytes for proof in proven)),
        "seconds": sum(proof.seconds for proof in proven),
    }
    measured = f"{len(proven)} proofs; a turned bit: {''.join(refusals)[:160]}"
    return [make_finding("proof of weights", problems, measured, numbers)]


def _run_and_save(context: Context, name: str, attempt: int) -> FinishedRun:
    plan = make_plan(
        context,
        training={"maxSteps": STEPS},
        execution={"saveEverySteps": SAVED},
        reference={"sync": {"everySteps": 2, "mixup": 0.3}},
        folder=context.path / name,
        attempt=attempt,
    )
    return trial_runs.run_trial(context, plan)


def _flip(parameter: torch.nn.Parameter) -> None:
    """Turn the lowest bit of the last element."""
    with torch.no_grad():
        parameter.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


STRATEGY_CELLS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    0: {
        "Clone": ("Clone", {}),
        "Clone, autocast": ("Clone", {"dtype": "float32", "autocast": True}),
        "Clone, gradient checkpointing": ("Clone", {"gradientCheckpointing": True}),
        "Offload": ("Offload", {}),
        "Adapter": ("Adapter", {}),
        "None": ("None", {}),
    },
    2: {
        "Clone": ("Clone", {}),
        "Offload": ("Offload", {}),
        "Adapter": ("Adapter", {}),
        "None": ("None", {}),
        "Clone, optimizer on the CPU": ("Clone", {"offload": "CPU"}),
    },
    3: {
        "Sharded": ("Sharded", {}),
        "Offload": ("Offload", {}),
        "Adapter": ("Adapter", {}),
        "None": ("None", {}),
        "Sharded, optimizer on the CPU": ("Sharded", {"offload": "CPU"}),
        "Sharded, not gathered to generate": ("Sharded", {"gatherForGeneration": False}),
    },
}
"""Strategy and settings by ZeRO stage and the row's name; bfloat16 unless the row says
otherwise."""
STAGES = {0: "no ZeRO", 2: "ZeRO-2", 3: "ZeRO-3"}


def train_strategies(context: Context, stage: int) -> list[Finding]:
    """Train every strategy of a ZeRO stage; one that fails does not end the others."""
    return [_trained_strategy(context, stage, name) for name in STRATEGY_CELLS[stage]]


def _trained_strategy(context: Context, stage: int, name: str) -> Finding:
    what = f"{STAGES[stage]}, {name}" + (f", {context.world} ranks" if context.world > 1 else "")
    strategy, execution = STRATEGY_CELLS[stage][name]
    plan = make_plan(context, strategy, stage, execution={"dtype": "bfloat16"} | execution)
    try:
        ran = trial_runs.run_trial(context, plan)
    # whatever it is, it is what the row has to say, and the next cell is another trainer
    except Exception as error:
        result, message = classify_error(error)
        return make_finding(what, [f"{result}: {message[:400]}"], "")
    problems = nonfinite_problems(ran.steps)
    if len(ran.steps) != plan.training.max_steps:
        problems.append(f"only steps {sorted(ran.steps)}")
    first = ran.steps.get(1, {}).get("kl", 0.0)
    if first != 0.0:
        problems.append(f"the KL of step 1 is {first:.3g}")
    last = ran.steps.get(max(ran.steps, default=0), {})
    keys = [key for key in ("loss", "kl", "grad_norm") if key in last]
    shown = ", ".join(f"{key} {last[key]:.4g}" for key in keys)
    counts = f"{len(ran.steps)} steps, {len(ran.trainer.proofs)} proofs"
    return make_finding(what, problems, f"{counts}; last: {shown}")
