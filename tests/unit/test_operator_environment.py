"""The variables that the operator sets in training containers: they hold for any image, and a
user's own win."""

from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.text.contract import RETURN_FREED_MEMORY
from grpo_operator.pods.pod_spec import pod_spec
from grpo_operator.pods.roles import roles
from grpo_planner.memory.phases import FRAGMENTATION
from tests.unit.operator_world import GPU_PLAN, PLAN, PODS, SPEC
from tests.unit.planning import H100, LLAMA_1B, nodes, spec
from tests.unit.planning import plan as planned

ALLOCATOR = "PYTORCH_ALLOC_CONF"


def environment(plan: ExecutionPlan = GPU_PLAN, **changes: Any) -> dict[str, str]:
    """The training container's variables that have a value."""
    pod = pod_spec("run", roles(parse_spec(SPEC | changes), plan)[0], {}, PODS)
    return {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}


def test_processes_on_gpus_get_the_allocator_that_their_memory_was_predicted_for() -> None:
    assert environment()["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(PLAN)
    own = [{"name": "PYTORCH_ALLOC_CONF", "value": "max_split_size_mb:512"}]
    assert not [name for name in environment(env=own) if name.endswith("CUDA_ALLOC_CONF")], (
        "torch would prefer ours"
    )


def test_freed_memory_goes_back_to_the_system_from_the_first_process_on() -> None:
    assert RETURN_FREED_MEMORY.items() <= environment().items()
    assert RETURN_FREED_MEMORY.items() <= environment(PLAN).items()


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({"requests": {"cpu": "34"}}, "8"),
        ({"limits": {"cpu": "16"}}, "4"),
        ({"requests": {"cpu": "8"}, "limits": {"cpu": "16"}}, "2"),
        ({"requests": {"cpu": "300m"}}, "1"),
        ({}, None),
    ],
)
def test_the_cores_of_a_pod_are_shared_out_among_its_processes(
    resources: dict[str, Any], threads: str | None
) -> None:
    assert GPU_PLAN.processes_per_node == 4
    assert environment(resources=resources).get("OMP_NUM_THREADS") == threads
    own = [{"name": "OMP_NUM_THREADS", "value": "3"}]
    assert environment(resources=resources, env=own)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("name", "settings", "expandable"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
        ("OTHER", "", True),
    ],
)
def test_the_memory_model_counts_on_expandable_segments_only_where_they_are_set(
    name: str, settings: str, expandable: bool
) -> None:
    usual = planned(spec(LLAMA_1B), nodes(1, 1, H100))
    chosen = planned(spec(LLAMA_1B, env=[{"name": name, "value": settings}]), nodes(1, 1, H100))
    assert usual.memory is not None
    assert chosen.memory is not None
    assert chosen.memory.expandable_segments is expandable
    assert (
        any("without expandable_segments:True" in text for text in chosen.warnings)
        is not expandable
    )
    more = FRAGMENTATION[expandable] - FRAGMENTATION[True]
    peak = usual.memory.peak_allocated_bytes
    assert (chosen.memory.device_bytes > usual.memory.device_bytes) is not expandable
    assert chosen.memory.device_bytes - usual.memory.device_bytes <= more * peak


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False"),
        ("OTHER", "expandable_segments: True"),
    ],
)
def test_a_new_job_may_have_segments_that_an_engine_sees(name: str, settings: str) -> None:
    variables = [{"name": name, "value": settings}]
    parse_spec(SPEC | {"env": variables, "export": {"to": "None"}}, creating=True)


def test_a_stored_job_stays_valid() -> None:
    parse_spec(SPEC | {"env": [{"name": ALLOCATOR, "value": "expandable_segments:True"}]})


def test_what_a_secret_says_is_not_counted_on() -> None:
    hidden = {
        "name": "PYTORCH_ALLOC_CONF",
        "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}},
    }
    chosen = planned(spec(LLAMA_1B, env=[hidden]), nodes(1, 1, H100))
    assert chosen.memory is not None
    assert not chosen.memory.expandable_segments
