"""What pods request of their nodes' disks: by what they will fetch, and only where a request can be
met."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_api.plan.learned import Learned
from grpo_api.spec.model import Architecture
from grpo_api.text.quantity import parameter_count
from grpo_api.text.units import GIB, MIB
from grpo_operator.admission.node_fit import extra_amounts, pod_amounts
from grpo_operator.admission.quota_gate import needs
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.memory.disk import DATASET, SMALL, WORKING, disk_note, disk_request, scratch_bytes
from grpo_planner.plan import plan_job
from grpo_planner.replan.refit import refit
from tests.generated import cases
from tests.unit.operator_world import PLAN, make_job
from tests.unit.planning import BARE, H100, LLAMA_1B, QWEN_32B, nodes
from tests.unit.queue_world import cluster, judged
from tests.unit.test_operator_manifests import container

CACHE = {"claimName": "hub"}
MOUNTED = {"dataset": {"files": {"volume": {"claimName": "data"}, "paths": ["a.jsonl"]}}}
DISK = "ephemeral-storage"
THERE = Inventory((nodes(1, 8, H100),), reports_disk=True)


def spec(**fields: Any) -> GRPOJobSpec:
    return parse_spec({**BARE, **fields})


def judge(**more: Any) -> dict[str, Any]:
    return {"model": {"name": "team/judge", **more}}


@pytest.mark.parametrize(
    ("fields", "fetched"),
    [
        ({"model": {"name": "team/m", "parameters": "2B"}}, 4_000_000_000 + DATASET),
        ({"model": {"name": "team/m", "parameters": "500M"}}, 2_000_000_000 + DATASET),
        ({"model": {"name": "/models/m", "parameters": "2B"}}, DATASET),
        ({"model": {"name": "/models/m", "parameters": "2B"}, **MOUNTED}, 0),
        ({"model": {"name": "team/m", "parameters": "2B"}, **MOUNTED}, 4_000_000_000),
        ({"model": {"name": "team/m", "parameters": "2B", "cache": CACHE}}, 0),
        (
            {
                "model": {"name": "team/m", "parameters": "2B"},
                "env": [{"name": "HF_HOME", "value": "/mine"}],
            },
            0,
        ),
        (
            {
                "model": {"name": "team/m", "parameters": "2B"},
                "env": [{"name": "HF_HUB_CACHE", "value": "/mine"}],
            },
            DATASET,
        ),
        (
            {
                "model": {"name": "/models/m", "parameters": "2B"},
                "rewards": [judge(parameters="3B")],
            },
            6e9 + DATASET,
        ),
        ({"model": {"name": "/models/m", "parameters": "2B"}, "rewards": [judge()]}, DATASET),
    ],
)
def test_the_sizes_of_what_is_fetched_are_added_up(fields: dict[str, Any], fetched: float) -> None:
    assert scratch_bytes(spec(**fields)) == WORKING + fetched


STORE = {"store": {"url": "s3://bucket/runs"}}
VOLUME = {"volume": {"claimName": "kept"}}
HUB = {
    "to": "Hub",
    "hub": {"repository": "team/out", "tokenSecretRef": {"name": "hub", "key": "token"}},
}
FOLDER = {"model": {"name": "/models/m", "parameters": "2B"}, **MOUNTED}
FLOAT, NARROW = {"dtype": "float32"}, {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("fields", "staged"),
    [
        ({"checkpoint": VOLUME}, 0),
        ({"checkpoint": VOLUME, "export": HUB}, 0),
        ({"export": {"to": "None"}}, 0),
        # twice weights, float32 copies and moments: one that was resumed from, one that is sent
        ({"checkpoint": STORE, "training": FLOAT}, 2 * 16 * 2e9),
        ({"checkpoint": STORE, "training": NARROW}, 2 * 14 * 2e9),
        ({"checkpoint": STORE, "export": {"to": "None"}}, 2 * 16 * 2e9),
        (
            {"checkpoint": STORE, "reference": {"sync": {"everySteps": 10, "mixup": 0.5}}},
            2 * 20 * 2e9,
        ),
        ({"export": HUB, "training": FLOAT}, 4 * 2e9),
        ({"export": HUB, "training": NARROW}, 2 * 2e9),
        ({"export": HUB, "adapter": {"use": "Always", "mergeOnExport": True}}, 4 * 2e9),
    ],
)
def test_what_is_on_its_way_to_a_store_or_the_hub_is_counted(
    fields: dict[str, Any], staged: float
) -> None:
    assert scratch_bytes(spec(**FOLDER, **fields)) - WORKING == pytest.approx(staged, rel=0.05)


@settings(max_examples=cases(60))
@given(
    place=st.sampled_from([STORE, VOLUME, {}]),
    export=st.sampled_from([HUB, {"to": "None"}, {"to": "ObjectStore"}]),
    adapter=st.fixed_dictionaries(
        {"use": st.sampled_from(["Never", "IfNeeded", "Always"]), "mergeOnExport": st.booleans()}
    ),
    dtype=st.sampled_from(["Auto", "float32", "bfloat16"]),
    sync=st.booleans(),
    gpus=st.integers(1, 8),
)
def test_no_plan_writes_more_than_its_pods_request(
    *,
    place: dict[str, Any],
    export: dict[str, Any],
    adapter: dict[str, Any],
    dtype: str,
    sync: bool,
    gpus: int,
) -> None:
    kept = export if export["to"] != "ObjectStore" or place is STORE else HUB
    fields: dict[str, Any] = {
        "checkpoint": place,
        "adapter": adapter,
        "training": {"dtype": dtype},
        "export": kept,
    }
    if sync and adapter["use"] == "Never":
        fields["reference"] = {"sync": {"everySteps": 10, "mixup": 0.5}}
    job = spec(model={"name": QWEN_32B if gpus > 4 else LLAMA_1B, "cache": CACHE}, **fields)
    chosen = plan_job(job, Inventory((nodes(2, gpus, H100),), reports_disk=True)).chosen
    if chosen is None:
        return
    assert chosen.memory is not None
    staged = 2 * chosen.memory.checkpoint_bytes if place is STORE else 0
    if place is not VOLUME and job.is_model_kept:
        staged = max(staged, chosen.export_bytes)
    assert chosen.ephemeral_storage_bytes >= WORKING + staged
    assert bool(staged) == (chosen.ephemeral_storage_bytes > WORKING)


COUNTS = st.integers(1_000, 10**12).map(str)


@settings(max_examples=cases(100))
@given(one=COUNTS, other=COUNTS, reward=st.none() | COUNTS)
def test_a_request_covers_the_weights_and_grows_with_them(
    one: str, other: str, reward: str | None
) -> None:
    def asked(parameters: str) -> int:
        rewards = [judge(parameters=reward)] if reward else [{"accuracy": {}}]
        job = spec(model={"name": "team/m", "parameters": parameters}, rewards=rewards)
        return disk_request(job, reported=True)

    counts = [parameter_count(count) for count in (one, other)]
    assert all(asked(str(count)) >= 2 * (count + int(reward or 0)) for count in counts)
    assert asked(one) % MIB == 0
    same_width = (counts[0] < SMALL) == (counts[1] < SMALL)
    assert (
        not same_width
        or (counts[0] <= counts[1]) == (asked(one) <= asked(other))
        or asked(one) == asked(other)
    )


@settings(max_examples=cases(60))
@given(
    amount=st.integers(1, 10**15), reported=st.booleans(), limit=st.booleans(), cached=st.booleans()
)
def test_what_the_user_asks_for_wins_and_is_held_against_what_will_be_written(
    amount: int, reported: bool, limit: bool, cached: bool
) -> None:
    model = {"name": QWEN_32B} | ({"cache": CACHE} if cached else {})
    job = spec(model=model, resources={"limits" if limit else "requests": {DISK: amount}})
    assert disk_request(job, reported=reported) == amount
    told, needed = disk_note(job), scratch_bytes(job)
    assert bool(told) == (amount < needed)
    assert not told or (f"{amount} of {DISK}" in told and ("will be evicted" in told) == limit)
    chosen = plan_job(job, THERE).chosen
    assert chosen is not None
    assert chosen.ephemeral_storage_bytes == amount
    assert (told in chosen.warnings) == bool(told)


def test_a_plan_and_all_its_candidates_ask_for_it_where_nodes_report_their_disks() -> None:
    job = spec(model={"name": LLAMA_1B})
    answer, silent = plan_job(job, THERE), plan_job(job, Inventory(THERE.nodes))
    asked = disk_request(job, reported=True)
    assert asked > 4 * GIB
    assert {one.ephemeral_storage_bytes for one in answer.candidates} == {asked}
    assert (
        answer.chosen == answer.candidates[0].model_copy(update={"rejected": None}) or answer.chosen
    )
    assert {one.ephemeral_storage_bytes for one in silent.candidates} == {0}


@pytest.mark.parametrize(
    "placement",
    [
        {"queueName": "gpus"},
        {
            "provisioning": "CreatePods", "gpuProduct": H100, "gpusPerNode": 8, "nodes": 1,
            "nodeSelector": {"pool": "a"},
        },
    ],
)  # fmt: skip
def test_nothing_is_requested_where_nobody_may_count_it(placement: dict[str, Any]) -> None:
    assert disk_request(spec(placement=placement), reported=True) == 0
    assert (
        disk_request(
            spec(placement=placement, resources={"requests": {DISK: "5Gi"}}), reported=True
        )
        == 5 * GIB
    )


def test_a_claim_for_the_cache_that_comes_while_the_job_is_stopped_lowers_the_request_of_the_kept_plan() -> (  # noqa: E501
    None
):
    kept = plan_job(spec(model={"name": QWEN_32B}), THERE).chosen
    assert kept is not None
    assert refit(kept, spec(model={"name": QWEN_32B}), THERE) is kept
    cached = refit(kept, spec(model={"name": QWEN_32B, "cache": CACHE}), THERE)
    assert cached == kept.model_copy(update={"ephemeral_storage_bytes": WORKING})


def test_the_kept_plan_of_a_model_that_an_attempt_has_reported_still_asks_for_its_weights() -> None:
    private = spec(model={"name": "mine/private"})
    reported = Architecture(
        model_type="llama", layers=16, hidden_size=2048, intermediate_size=8192,
        attention_heads=32, vocab_size=128256,
    )  # fmt: skip
    learned = Learned(architecture=reported)
    kept = plan_job(private, THERE, learned=learned).chosen
    assert kept is not None
    assert kept.ephemeral_storage_bytes > 4 * GIB
    assert refit(kept, private, THERE, learned) is kept


def test_the_container_requests_it_and_has_no_limit() -> None:
    found = container(PLAN.model_copy(update={"ephemeral_storage_bytes": 3 * GIB}))["resources"]
    assert found["requests"][DISK] == str(3 * GIB)
    assert DISK not in found.get("limits", {})
    assert DISK not in container()["resources"]["requests"]


def offering(*sizes: str) -> Any:
    """Nodes of eight GPUs with disks of these sizes in GiB; empty: a node that says nothing of its
    disk."""
    snapshot = cluster(*(8 for _ in sizes))
    for node, size in zip(snapshot.nodes, sizes, strict=True):
        if size:
            node.offers[DISK] = float(size) * GIB
    return snapshot


LARGE = {
    "placement": {"accelerator": "GPU", "nodes": 1},
    "model": {"name": "team/m", "parameters": "32B"},
}
"""What it fetches takes 59.6 GiB."""


def test_a_request_that_no_node_can_meet_is_told_before_there_is_a_pod() -> None:
    job = make_job(LARGE)
    verdict = judged([job], offering("50", "40"))[job.uid]
    assert (verdict.admitted, verdict.plan, verdict.reason) == (
        False,
        None,
        "OutOfEphemeralStorage",
    )
    assert verdict.message.startswith(
        "the job would fit, but for the room on nodes' disks: node node-0: left out, "
    )
    told = (
        "it offers 50.0 GiB of ephemeral-storage, and a pod requests 61.9 GiB: give "
        "spec.model.cache a claim"
    )
    assert told in verdict.message
    smaller = make_job({**LARGE, "model": {"name": QWEN_32B, "cache": CACHE}})
    assert judged([smaller], offering("50", "40"))[smaller.uid].admitted
    asking = make_job({**LARGE, "resources": {"requests": {DISK: "60Gi"}}})
    assert (
        "lower spec.resources.requests.ephemeral-storage"
        in judged([asking], offering("50"))[asking.uid].message
    )


def test_what_would_help_depends_on_what_is_written() -> None:
    def told(**fields: Any) -> str:
        job = make_job({**LARGE, **fields})
        return str(judged([job], offering("50"))[job.uid].message)

    cached = {"name": "team/m", "parameters": "32B", "cache": CACHE}
    cache, volume = (
        "give spec.model.cache a claim for what is fetched",
        "set spec.checkpoint.volume",
    )
    assert told(checkpoint={"volume": {"claimName": "kept"}}).endswith(f": {cache}")
    assert f": {cache}, or {volume} instead of store, or set spec.resources" in told(
        checkpoint=STORE
    )
    assert told(checkpoint=STORE, model=cached).endswith(
        f": {volume} instead of store, or set spec.resources.requests.ephemeral-storage to less, "
        "since ZeRO splits "
        "checkpoints over nodes"
    )
    assert told(checkpoint={}, export=HUB, model=cached).endswith(f": {volume} for the export")


def test_the_reason_is_the_disks_only_where_the_nodes_would_do_but_for_them() -> None:
    def reason(placement: dict[str, Any], *sizes: str) -> tuple[str, str]:
        job = make_job({**LARGE, "placement": {"accelerator": "GPU", **placement}})
        verdict = judged([job], offering(*sizes))[job.uid]
        return verdict.reason, verdict.message

    assert reason({"nodes": 1, "nodeSelector": {"pool": "mine"}}, "50")[0] == "NoGPUs"
    assert reason({"nodes": 1, "gpuProduct": "NVIDIA-B200"}, "50")[0] == "NoGPUs"
    assert reason({"gpus": {"min": 24}, "nodes": None}, "50", "100")[0] == "NotEnoughGPUs"
    fewer, told = reason({"gpus": {"min": 16}, "nodes": None}, "50", "100")
    assert fewer == "OutOfEphemeralStorage"
    assert "node node-0: left out, it offers 50.0 GiB" in told
    assert "node-1" not in told


@pytest.mark.parametrize(
    ("sizes", "asks"),
    [(("", ""), False), (("", "100"), True), (("100", "100"), True)],
    ids=["none", "some", "all"],
)
def test_nodes_that_say_nothing_of_their_disks_are_used_only_without_a_request(
    sizes: tuple[str, ...], asks: bool
) -> None:
    job = make_job(LARGE)
    verdict = judged([job], offering(*sizes))[job.uid]
    assert verdict.admitted
    assert verdict.plan is not None
    assert bool(verdict.plan.ephemeral_storage_bytes) == asks
    assert bool(verdict.plan.nodes == 2) <= (not asks or "" not in sizes)


def test_a_node_whose_disk_others_have_taken_is_waited_for() -> None:
    snapshot = offering("100")
    taken = cluster(8, other_use={"node-0": {DISK: 60.0 * GIB}})
    taken.nodes[0].offers[DISK] = snapshot.nodes[0].offers[DISK]
    job = make_job(LARGE)
    verdict = judged([job], taken)[job.uid]
    assert (verdict.admitted, verdict.reason) == (False, "WaitingForGPUs")
    assert judged([job], snapshot)[job.uid].admitted


def test_quotas_and_nodes_count_what_the_pods_request() -> None:
    job = spec(model={"name": LLAMA_1B})
    chosen = plan_job(job, THERE).chosen
    assert chosen is not None
    asked = float(chosen.ephemeral_storage_bytes)
    assert pod_amounts(job, chosen)[DISK] == extra_amounts(job, reports_disk=True)[DISK] == asked
    assert needs(job, chosen, f"requests.{DISK}") == chosen.nodes * asked
    assert needs(job, chosen, f"limits.{DISK}") == 0
