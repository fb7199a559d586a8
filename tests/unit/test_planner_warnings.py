"""What the planner warns of although the plan stands: what it has assumed, and what may not go as it estimates."""

from tests.unit.planning import H100, LLAMA_1B, nodes, plan, spec


def test_a_step_that_is_estimated_near_the_hang_limit_is_warned_of() -> None:
    slow = spec(LLAMA_1B, guard__hangTimeoutSeconds=10, training__promptsPerStep=512)
    seconds = plan(slow, nodes(1, 1, H100)).estimated_step_seconds or 0.0
    assert 3 * seconds > 10
    assert any(f"a hang only after {3 * seconds:.0f} s" in text for text in plan(slow, nodes(1, 1, H100)).warnings)
    calm = spec(LLAMA_1B, guard__hangTimeoutSeconds=86400, training__promptsPerStep=512)
    assert not any("a hang" in text for text in plan(calm, nodes(1, 1, H100)).warnings)
