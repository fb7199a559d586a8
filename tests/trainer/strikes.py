"""What must be true of a run that met a number that is not finite
(tests/support/facts/divergence_facts.py)."""

from typing import Any

from tests.support.facts.divergence_facts import SAVED


def stopped_in_time(facts: dict[str, Any]) -> None:
    """It ended as Diverged, nothing was sealed after the number, and the optimizer took no step
    with a bad gradient."""
    step = facts["step"]
    assert facts["ended"].startswith("Diverged: "), facts
    before = (step - 1) // SAVED * SAVED
    assert facts["sealed"] == ([before] if before else []), facts
    assert facts["good"], facts
    if facts["moment"] in ("weights", "optimizer"):
        return
    assert f" at step {step}" in facts["ended"]
    assert facts["finite"], "the optimizer has stepped with what is not finite"
