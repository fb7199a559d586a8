"""What the planner warns of although the plan stands: what it has assumed, and what may not go as it estimates."""

from tests.unit.planning import H100, LLAMA_1B, nodes, plan, spec


def test_a_step_that_is_estimated_near_the_hang_limit_is_warned_of() -> None:
    slow = spec(LLAMA_1B, guard__hangTimeoutSeconds=10, training__promptsPerStep=512)
    seconds = plan(slow, nodes(1, 1, H100)).estimated_step_seconds or 0.0
    assert 3 * seconds > 10
    assert any(f"a hang only after {3 * seconds:.0f} s" in text for text in plan(slow, nodes(1, 1, H100)).warnings)
    calm = spec(LLAMA_1B, guard__hangTimeoutSeconds=86400, training__promptsPerStep=512)
    assert not any("a hang" in text for text in plan(calm, nodes(1, 1, H100)).warnings)


def test_a_plan_on_several_nodes_without_rdma_cards_says_that_its_network_is_assumed() -> None:
    groups, wanted = nodes(2, 8, H100), {"placement__nodes": 2, "placement__gpus": {"min": 16, "max": 16}}

    def warned(**more: object) -> bool:
        chosen = plan(spec(LLAMA_1B, **wanted, **more), groups)
        assert chosen.nodes == 2
        return any("GB/s per GPU between nodes" in text for text in chosen.warnings)

    assert warned()
    assert not warned(resources__limits={"rdma/hca_shared_devices_a": 1})
    assert not any("between nodes" in text for text in plan(spec(LLAMA_1B), nodes(1, 8, H100)).warnings)
