"""Checks that the image has the libraries that the plan needs, without importing them."""

from importlib.util import find_spec

from ..runtime.errors import BadInput
from .scope import Preflight


def check_image(preflight: Preflight) -> None:
    """Look for vLLM and for libraries of which the plan has a use."""
    plan, findings = preflight.plan, preflight.findings
    findings.has_vllm = find_spec("vllm") is not None
    if plan.generation.engine == "Colocated" and not findings.has_vllm:
        with findings.check("spec.generation.engine"):
            raise BadInput(
                "the image has no vLLM, which Colocated needs; set spec.image to one that has it, "
                "or engine to Transformers"
            )
    needed = {
        "deepspeed": plan.execution.zero_stage > 0,
        "bitsandbytes": plan.execution.optimizer == "AdamW8bit",
        "math_verify": any(
            reward.accuracy and reward.accuracy.compare == "Math" for reward in plan.rewards
        ),
    }
    missing = [name for name, is_used in needed.items() if is_used and find_spec(name) is None]
    if missing:
        with findings.check("spec.image"):
            raise BadInput(
                f"the image has no {', '.join(missing)}, which this plan needs; use an image with "
                "the trainer's packages"
            )
