"""Every reference strategy under one ZeRO stage: does it train on this device at all.

Which pairs there are is what the trainer supports; each is a row.
"""

from typing import Any

from ..errors import classify
from . import attempts
from .attempts import finite
from .findings import Context, Finding, judged
from .plans import make_plan

CELLS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
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
"""Strategy and settings by ZeRO stage and the row's name; bfloat16 unless the row says otherwise."""
STAGES = {0: "no ZeRO", 2: "ZeRO-2", 3: "ZeRO-3"}


def train(context: Context, stage: int) -> list[Finding]:
    """All of a stage; one that fails keeps no other from being tried."""
    return [_trained(context, stage, name) for name in CELLS[stage]]


def _trained(context: Context, stage: int, name: str) -> Finding:
    what = f"{STAGES[stage]}, {name}" + (f", {context.world} ranks" if context.world > 1 else "")
    strategy, execution = CELLS[stage][name]
    plan = make_plan(context, strategy, stage, execution={"dtype": "bfloat16"} | execution)
    try:
        ran = attempts.run(context, plan)
    except Exception as error:  # whatever it is, it is what the row has to say, and the next cell is another trainer
        result, message = classify(error)
        return judged(what, [f"{result}: {message[:400]}"], "")
    problems = finite(ran.steps)
    problems += [] if len(ran.steps) == plan.training.max_steps else [f"only steps {sorted(ran.steps)}"]
    first = ran.steps.get(1, {}).get("kl", 0.0)
    problems += [] if first == 0.0 else [f"the KL of step 1 is {first:.3g}"]
    last = ran.steps.get(max(ran.steps, default=0), {})
    shown = ", ".join(f"{key} {last[key]:.4g}" for key in ("loss", "kl", "grad_norm") if key in last)
    return judged(what, problems, f"{len(ran.steps)} steps, {len(ran.trainer.proofs)} proofs; last: {shown}")
