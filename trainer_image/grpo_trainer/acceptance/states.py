"""What a run keeps: a checkpoint that goes on exactly, and weights that are proven to be those of the file.

A GPU's kernels may add in another order each time; then no resume can be more alike than the same run is to itself. So
the run is made twice, and a resume may differ by as much as these two do, which is nothing where kernels are
deterministic.
"""

import shutil
from pathlib import Path

import torch

from ..engine import ReferenceGRPOTrainer
from ..errors import WeightsDiffer
from ..paths import attempt_folder, checkpoint_folder
from . import attempts
from .attempts import Ran, difference
from .findings import Context, Finding, judged
from .plans import make_plan

STEPS, SAVED = 6, 3


def resume(context: Context) -> list[Finding]:
    """A run with a moving reference, the same again, and one that goes on from the first one's middle."""
    whole, again = _run(context, "whole", 1), _run(context, "again", 1)
    last = checkpoint_folder(_attempt(context, "whole"), STEPS)
    shutil.rmtree(last)
    resumed = _run(context, "whole", 2)
    noise, gap = difference(whole.steps, again.steps), difference(whole.steps, resumed.steps)
    problems = [] if resumed.trainer.resumed_from else ["it began anew"]
    problems += [] if sorted(resumed.steps) == list(range(SAVED + 1, STEPS + 1)) else [f"steps {sorted(resumed.steps)}"]
    problems += [] if gap <= noise else [f"the resumed run differs by {gap:.2g}, the same run twice by {noise:.2g}"]
    seen = f"resumed at step {SAVED}: differs by {gap:g}; the same run twice: by {noise:g}"
    return [judged("checkpoint and resume", problems, seen, {"resumed": gap, "again": noise})]


def proof(context: Context) -> list[Finding]:
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

    ran = attempts.run(context, make_plan(context, training={"maxSteps": 1}), look)
    device, *found = answers
    problems = [] if device == context.device else [f"the weights lie on {device}"]
    problems += [] if found else ["a turned bit was not found"]
    proven = ran.trainer.proofs
    numbers: dict[str, float | str] = {
        "bytes": float(sum(one.bytes for one in proven)),
        "seconds": sum(one.seconds for one in proven),
    }
    seen = f"{len(proven)} proofs; a turned bit: {''.join(found)[:160]}"
    return [judged("proof of weights", problems, seen, numbers)]


def _run(context: Context, name: str, attempt: int) -> Ran:
    folder = context.path / name
    plan = make_plan(
        context,
        training={"maxSteps": STEPS},
        execution={"saveEverySteps": SAVED},
        reference={"sync": {"everySteps": 2, "mixup": 0.3}},
        folder=folder,
        attempt=attempt,
    )
    return attempts.run(context, plan)


def _attempt(context: Context, name: str) -> Path:
    folder = attempt_folder(make_plan(context, folder=context.path / name))
    assert folder is not None
    return folder


def _flip(parameter: torch.nn.Parameter) -> None:
    """Turn the lowest bit of the last element."""
    with torch.no_grad():
        parameter.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
