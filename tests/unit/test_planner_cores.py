"""Cores that pods on GPUs request by default: two per GPU, and never more than their share of a
node."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.pods.pod_spec import pod_spec
from grpo_operator.pods.roles import roles
from grpo_planner.hardware.inventory import declared_inventory
from grpo_planner.hardware.pools import Pool, build_pools
from tests.unit.operator_world import PODS
from tests.unit.planning import H100, L4, LLAMA_1B, QWEN_7B, inventory, nodes, plan, spec

ENGINES: dict[str, Any] = {"generation__engine": "Servers", "generation__servers": {"replicas": 1}}


def pool(*cores: float, gpus: int = 8) -> Pool:
    """Nodes with so many cores each."""
    kinds = (nodes(1, gpus, H100, cpu_total=each, cpu_free=each) for each in cores)
    (found,), _ = build_pools(inventory(*kinds), spec(LLAMA_1B))
    return found


def requests(cores: float, gpus: int, **changes: Any) -> list[str]:
    """The CPU requests of the pods of a plan on one node, the trainer's first."""
    job = spec(QWEN_7B, **changes)
    there = nodes(1, gpus, L4, cpu_total=cores, cpu_free=cores)
    pods = (pod_spec("run", role, {}, PODS) for role in roles(job, plan(job, there)))
    return [pod["containers"][0]["resources"]["requests"]["cpu"] for pod in pods]


@given(
    cores=st.lists(st.floats(0.1, 512), min_size=1, max_size=4),
    node_gpus=st.integers(1, 16),
    used=st.integers(1, 16),
    engine=st.booleans(),
)
def test_a_pod_requests_no_more_than_its_share_of_any_node(
    cores: list[float], node_gpus: int, used: int, engine: bool
) -> None:
    used = min(used, node_gpus)
    millicores = pool(*cores, gpus=node_gpus).default_millicores(used, engine=engine)
    wanted, least = 2000 * used + 1000 * engine, 250 * used
    for_gpus = min(max(0.0, each - max(1.0, each / 10)) for each in cores)
    share = 1000 * for_gpus * used / node_gpus
    assert least <= millicores <= wanted
    assert millicores <= max(least, share + 1e-6)
    # All of it where there is enough, and else all whole cores of the share.
    assert millicores in (wanted, least) or millicores + 1000 > share - 1e-6


@pytest.mark.parametrize(
    ("cores", "used", "engine", "millicores"),
    [
        (128, 8, False, 16000),
        (128, 8, True, 17000),
        (128, 1, True, 3000),
        (15.9, 8, False, 14000),
        (15.9, 1, False, 1000),
        (4, 8, False, 3000),
        (2, 8, False, 2000),
        (2, 1, False, 250),
    ],
)
def test_a_share_is_rounded_down_to_whole_cores(
    cores: float, used: int, engine: bool, millicores: int
) -> None:
    assert pool(cores).default_millicores(used, engine=engine) == millicores


def test_training_pods_and_engine_pods_request_cores_by_their_role() -> None:
    assert requests(192, 8, **ENGINES)[1] == "3000m"
    assert int(requests(192, 8, **ENGINES)[0].removesuffix("m")) % 2000 == 0


def test_a_jobs_own_resources_win() -> None:
    own: dict[str, Any] = {"resources__requests": {"cpu": "300m"}}
    assert requests(192, 8, **own) == ["300m"]
    chosen = plan(spec(QWEN_7B, **own), nodes(1, 8, L4))
    assert chosen.cpu_millicores == 300


def test_a_node_whose_cores_are_taken_has_no_room() -> None:
    job = spec(LLAMA_1B, placement__gpus={"min": 4, "max": 4})
    roomy, busy = nodes(1, 4, H100), nodes(1, 4, L4, cpu_free=7.9)
    assert plan(job, roomy, busy).gpu_product == H100
    assert plan(job, nodes(1, 4, L4, cpu_free=8.0)).gpu_product == L4


def test_nodes_that_are_not_there_yet_have_enough() -> None:
    job = spec(
        LLAMA_1B,
        placement__provisioning="CreatePods",
        placement__gpuProduct=H100,
        placement__gpusPerNode=8,
        placement__nodes=1,
        placement__nodeSelector={"pool": "gpu"},
    )
    (found,), _ = build_pools(declared_inventory(job.placement), job)
    assert found.default_millicores(8) == 16000


def test_few_cores_per_gpu_are_warned_of() -> None:
    def warning(cores: float, **changes: Any) -> str:
        chosen = plan(spec(QWEN_7B, **changes), nodes(1, 8, H100, cpu_total=cores, cpu_free=cores))
        return next((text for text in chosen.warnings if "cores" in text), "")

    assert warning(8.0) == (
        "these nodes leave 8 GPUs 7 of the usual 16 cores: rewards, tokenizing and engines may "
        "take longer than estimated"
    )
    assert warning(192.0) == ""
    assert warning(8.0, resources__requests={"cpu": "4"}) == ""
