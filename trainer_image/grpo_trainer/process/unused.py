"""Keeps libraries out of the process that the plan has no use for.

peft imports bitsandbytes wherever it is installed, and accelerate does the same with DeepSpeed: a third of the time
that imports take, and for bitsandbytes the whole of torch's compiler.
"""

import sys
from types import ModuleType
from typing import cast

from grpo_api.plan.plan import TrainingPlan


def leave_out(plan: TrainingPlan) -> None:
    """From here on Python takes the unused libraries for not installed; those already imported stay.

    None in sys.modules means just that (Python's reference, "The module cache"), to importlib.util.find_spec too, by
    which the other libraries ask.
    """
    modules = cast(dict[str, ModuleType | None], sys.modules)
    for name in unused(plan):
        modules.setdefault(name, None)


def unused(plan: TrainingPlan) -> list[str]:
    """Optional libraries that this plan never calls."""
    execution = plan.execution
    needed = {"bitsandbytes": execution.optimizer == "AdamW8bit", "deepspeed": execution.zero_stage > 0}
    return [name for name, used in needed.items() if not used]
