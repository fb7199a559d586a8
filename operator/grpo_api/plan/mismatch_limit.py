"""How far an engine's log-probabilities may differ from the trainer's before the attempt ends.

The planner writes the limit into the plan, the trainer ends the attempt by it, the CLI shows it.
"""

from typing import Literal

from ..spec.generation import EngineArguments, GenerationSpec
from ..spec.run_policy import GuardSpec

ComputeDtype = Literal["bfloat16", "float32"]

MISMATCH_LIMITS: dict[ComputeDtype, float] = {"float32": 0.01, "bfloat16": 0.1}
"""Nats in the mean, by the dtype that policy and engine compute in. Right engines differ by 1e-6 in
float32 on CPUs (measured); kernels that round to TF32 make a thousand times more of it. In bfloat16
a logit of 16 to 32 is rounded by up to 0.06, mostly less."""


def mismatch_limit(
    guard: GuardSpec, generation: GenerationSpec, dtype: ComputeDtype
) -> float | None:
    """Nats above which an attempt ends; None where a larger difference is only printed.

    An 8-bit cache of keys and values moves the engine's numbers by design, so it ends no attempt by
    a limit that nobody has set.
    """
    if guard.max_engine_mismatch is not None:
        return guard.max_engine_mismatch
    arguments = generation.engine_arguments or EngineArguments()
    has_full_cache = arguments.kv_cache_dtype in (None, "auto")
    return MISMATCH_LIMITS[dtype] if has_full_cache else None
