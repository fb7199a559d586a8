"""Nodes and pods as the API server describes them → what the planner may use: every trap has its
case."""

from typing import Any

import pytest

from grpo_api.spec.run_policy import PlacementSpec
from grpo_kube.objects.json_reader import JsonObject
from grpo_operator.admission.inventory import (
    cards,
    left_out,
    node_facts,
    planner_node,
    pod_facts,
    pod_requests,
    quantity,
    takers,
)

GFD = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.compute.major": "9",
    "nvidia.com/gpu.compute.minor": "0",
}


def node(
    labels: dict[str, str] | None = None,
    gpus: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
    ready: str = "True",
    **spec: Any,
) -> Any:
    offers = {"cpu": "64", "memory": "1Ti", **({"nvidia.com/gpu": "8"} if gpus is None else gpus)}
    return {
        "metadata": {"name": "node-0", "labels": GFD if labels is None else labels},
        "spec": {"taints": taints or [], **spec},
        "status": {"allocatable": offers, "conditions": [{"type": "Ready", "status": ready}]},
    }


def test_a_node_with_all_its_labels() -> None:
    facts = node_facts(node())
    (kind,), warnings = cards(facts)
    assert warnings == []
    seen = planner_node(facts, kind, {"nvidia.com/gpu": 3.0, "memory": 2.0**30, "cpu": 1.5})
    assert (seen.name, seen.gpu_product, seen.gpu_memory_mib) == (
        "node-0",
        "NVIDIA-H100-80GB-HBM3",
        81559,
    )
    assert (seen.gpus_free, seen.gpus_total, seen.compute_capability) == (5, 8, (9, 0))
    assert (seen.host_memory_total - seen.host_memory_free, seen.cpu_free) == (2**30, 62.5)
    assert seen.node_selector == (("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"),)


@pytest.mark.parametrize(
    ("changes", "gpus", "says"),
    [
        (
            {"nvidia.com/gpu.sharing-strategy": "time-slicing"},
            {"nvidia.com/gpu": "32"},
            "shared or time-sliced",
        ),
        (
            {"nvidia.com/gpu.product": "NVIDIA-T4-SHARED"},
            {"nvidia.com/gpu": "8"},
            "shared or time-sliced",
        ),
        ({"nvidia.com/gpu.replicas": "4"}, {"nvidia.com/gpu": "8"}, "shared or time-sliced"),
        ({}, {"nvidia.com/gpu": "9"}, "offers 9 nvidia.com/gpu but its label counts 8"),
        ({"nvidia.com/mig-1g.10gb.replicas": "2"}, {"nvidia.com/mig-1g.10gb": "7"}, "are shared"),
    ],
    ids=[
        "time-sliced by its strategy label",
        "shared by its product",
        "shared by its replicas",
        "of several products, or shared without a label",
        "shared MIG instances",
    ],
)
def test_gpus_that_can_not_be_counted_on_are_left_out(
    changes: dict[str, str], gpus: dict[str, str], says: str
) -> None:
    found, warnings = cards(node_facts(node({**GFD, **changes}, gpus)))
    assert found == []
    assert len(warnings) == 1
    assert warnings[0].startswith("node node-0: ")
    assert says in warnings[0]


GKE_NODE = "cloud.google.com/gke-"


@pytest.mark.parametrize("accelerator", ["nvidia-l4", "nvidia-of-next-year", None])
@pytest.mark.parametrize("nvidia", [{}, {"nvidia.com/gpu.product": "NVIDIA-L4"}])
@pytest.mark.parametrize(
    "shared",
    [
        {"gpu-sharing-strategy": "time-sharing", "max-shared-clients-per-gpu": "4"},
        {"gpu-sharing-strategy": "mps"},
        {"max-shared-clients-per-gpu": "2"},
    ],
)
def test_gpus_that_gke_shares_are_left_out_whatever_else_is_known_of_them(
    accelerator: str | None, nvidia: dict[str, str], shared: dict[str, str]
) -> None:
    labels = {f"{GKE_NODE}{name}": value for name, value in shared.items()} | nvidia
    if accelerator:
        labels |= {f"{GKE_NODE}accelerator": accelerator}
    found, warnings = cards(node_facts(node(labels)))
    assert found == []
    assert "are shared or time-sliced, so their memory can't be counted on" in warnings[0]


@pytest.mark.parametrize("clients", ["1", "", "0", "many"])
def test_gpus_that_gke_gives_to_one_pod_each_are_counted(clients: str) -> None:
    labels = {f"{GKE_NODE}max-shared-clients-per-gpu": clients}
    (kind,), _ = cards(node_facts(node(GFD | labels)))
    assert kind.count == 8


def test_fewer_gpus_than_the_label_counts_are_used_as_they_are() -> None:
    (kind,), warnings = cards(node_facts(node(gpus={"nvidia.com/gpu": "7"})))
    assert (kind.count, warnings) == (7, [])


def test_without_labels_only_the_count_is_known() -> None:
    (kind,), warnings = cards(node_facts(node({})))
    assert (kind.count, kind.product, kind.memory_mib, kind.selector) == (8, "", 0, ())
    assert "set placement.gpuMemory" in warnings[0]


@pytest.mark.parametrize("text", ["0", "", "eighty"])
def test_a_memory_label_that_says_nothing_is_unknown(text: str) -> None:
    (kind,), warnings = cards(node_facts(node({**GFD, "nvidia.com/gpu.memory": text})))
    assert kind.memory_mib == 0
    assert "gpu.memory label is missing or 0" in warnings[0]


def test_mig_single_gives_one_instance_per_pod() -> None:
    labels = {
        **GFD,
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
        "nvidia.com/gpu.memory": "9728",
    }
    facts = node_facts(node({**labels, "nvidia.com/gpu.count": "56"}, {"nvidia.com/gpu": "56"}))
    (kind,), _ = cards(facts)
    seen = planner_node(facts, kind, {"nvidia.com/gpu": 55.0})
    assert (seen.gpu_memory_mib, seen.gpus_free, seen.gpus_total) == (9728, 1, 1)
    assert planner_node(facts, kind, {"nvidia.com/gpu": 56.0}).gpus_free == 0


def test_mig_mixed_gives_every_profile_as_a_product() -> None:
    labels = {
        **GFD,
        "nvidia.com/mig-3g.40gb.memory": "40448",
        "nvidia.com/mig-1g.10gb.memory": "9728",
    }
    gpus = {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "2", "nvidia.com/mig-1g.10gb": "1"}
    found, _ = cards(node_facts(node(labels, gpus)))
    assert [(kind.resource, kind.product, kind.memory_mib) for kind in found] == [
        ("nvidia.com/mig-1g.10gb", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", 9728),
        ("nvidia.com/mig-3g.40gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", 40448),
    ]


def test_amd_gpus_by_their_own_labels() -> None:
    labels = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
    (kind,), warnings = cards(node_facts(node(labels, {"amd.com/gpu": "8"})))
    assert (kind.resource, kind.product, kind.memory_mib) == (
        "amd.com/gpu",
        "AMD_Instinct_MI300X_OAM",
        192 * 1024,
    )
    assert (kind.selector, warnings) == (
        (("amd.com/gpu.product-name", "AMD_Instinct_MI300X_OAM"),),
        [],
    )
    (bare,), warnings = cards(node_facts(node({}, {"amd.com/gpu": "8"})))
    assert (bare.memory_mib, "amd.com/gpu.vram" in warnings[0]) == (0, True)


def test_links_and_price_are_read_off_the_administrators_labels() -> None:
    labels = {
        "grpo.dev/node-gbps": "12.5",
        "grpo.dev/gpu-gbps": "450",
        "grpo.dev/gpu-hour-price": "2.49",
    }
    facts = node_facts(node(GFD | labels))
    (kind,), _ = cards(facts)
    seen = planner_node(facts, kind, {})
    assert (seen.node_gbps, seen.gpu_gbps, seen.gpu_hour_price) == (12.5, 450, 2.49)
    for text in ("", "fast", "-1", "1e9", "nan", "1.2.3", "12345678"):
        odd = node_facts(node(GFD | dict.fromkeys(labels, text)))
        seen = planner_node(odd, kind, {})
        assert (seen.node_gbps, seen.gpu_gbps, seen.gpu_hour_price) == (0, 0, 0), (
            "a label can't be refused"
        )


def test_a_product_s_price_is_that_of_nodes_without_a_label() -> None:
    (kind,), _ = cards(node_facts(node(GFD)))
    prices = {kind.product: 3.5}
    for label, wanted in (({}, 3.5), ({"grpo.dev/gpu-hour-price": "2.49"}, 2.49)):
        facts = node_facts(node(GFD | label), prices)
        assert planner_node(facts, kind, {}).gpu_hour_price == wanted
    assert planner_node(node_facts(node(GFD), {"another": 1.0}), kind, {}).gpu_hour_price == 0


def test_a_node_without_gpus_has_no_cards_and_no_warning() -> None:
    assert cards(node_facts(node({}, {}))) == ([], [])


TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}
EVICTED_LATER = {"operator": "Exists", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("item", "placement", "why"),
    [
        (node(), {}, ""),
        (node(ready="False"), {}, "not ready or cordoned"),
        (node(ready="Unknown"), {}, "not ready or cordoned"),
        (node(unschedulable=True), {}, "not ready or cordoned"),
        (node(), {"nodeSelector": {"zone": "b"}}, "label zone is not b"),
        (node({**GFD, "zone": "b"}), {"nodeSelector": {"zone": "b"}}, ""),
        (node(taints=[TAINT]), {}, "taint team=a:NoSchedule"),
        (node(taints=[{**TAINT, "effect": "PreferNoSchedule"}]), {}, ""),
        (node(taints=[TAINT]), {"tolerations": [{"key": "team", "value": "a"}]}, ""),
        (
            node(taints=[TAINT]),
            {"tolerations": [{"key": "team", "value": "b"}]},
            "taint team=a:NoSchedule",
        ),
        (node(taints=[TAINT]), {"tolerations": [{"key": "team", "operator": "Exists"}]}, ""),
        (node(taints=[TAINT]), {"tolerations": [{"operator": "Exists"}]}, ""),
        (
            node(taints=[TAINT]),
            {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]},
            "taint team=a:NoSchedule",
        ),
        (node(taints=[{"key": "nvidia.com/gpu", "value": "x", "effect": "NoSchedule"}]), {}, ""),
        (
            node(taints=[{"key": "nvidia.com/gpu", "value": "x", "effect": "NoExecute"}]),
            {},
            "taint nvidia.com/gpu=x:NoExecute",
        ),
        (node(taints=[{"key": "amd.com/gpu", "effect": "NoSchedule"}]), {}, ""),
    ],
)
def test_which_nodes_a_jobs_pods_could_be_bound_to(
    item: Any, placement: dict[str, Any], why: str
) -> None:
    assert left_out(node_facts(item), PlacementSpec.model_validate(placement)) == why


def pod(name: str, requests: dict[str, str], **more: Any) -> Any:
    return {
        "metadata": {"namespace": "team-a", "name": name, "labels": more.get("labels", {})},
        "spec": {
            "nodeName": more.get("node", "node-0"),
            "containers": [{"resources": {"requests": requests}}],
        },
        "status": {"phase": more.get("phase", "Running")},
    }


def test_only_pods_that_hold_a_node_count() -> None:
    assert pod_facts(pod("done", {}, phase="Succeeded")) is None
    assert pod_facts(pod("failed", {}, phase="Failed")) is None
    assert pod_facts(pod("unbound", {}, node="")) is None
    facts = pod_facts(pod("p", {"nvidia.com/gpu": "2", "cpu": "500m"}))
    assert facts is not None
    assert facts.takes == {"nvidia.com/gpu": 2.0, "cpu": 0.5}


def test_holders_are_named_by_their_grpojob_and_the_biggest_comes_first() -> None:
    ours = {"grpo.dev/job-name": "run-7"}
    pods = [
        pod_facts(pod("notebook", {"nvidia.com/gpu": "1"})),
        pod_facts(pod("run-7-1-0", {"nvidia.com/gpu": "2"}, labels=ours)),
        pod_facts(pod("run-7-1-1", {"nvidia.com/gpu": "2"}, labels=ours)),
        pod_facts(pod("web", {"cpu": "1"})),
    ]
    found = takers((one for one in pods if one), "nvidia.com/gpu")
    assert list(found.items()) == [("team-a/run-7", 4), ("team-a/notebook", 1)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("16Gi", 2.0**34), ("80G", 8e10), ("1e3", 1000.0), ("2", 2.0), ("128974848000m",
    128974848.0),
     ("junk", 0.0), (None, 0.0), (3, 3.0)],
)  # fmt: skip
def test_quantities(text: object, value: float) -> None:
    assert quantity(text) == value


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


SIDECAR = container("2", restartPolicy="Always")


@pytest.mark.parametrize(
    ("spec", "cpu"),
    [
        ({"containers": [container("1"), container("2")]}, 3),
        ({"containers": [container("1")], "initContainers": [container("4")]}, 4),
        ({"containers": [container("1")], "initContainers": [SIDECAR]}, 3),
        (
            {
                "containers": [container("1")],
                "initContainers": [SIDECAR, container("3")],
            },
            5,
        ),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, 1.25),
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "6"}}}, 6),
        ({"containers": [{}]}, 0),
    ],
    ids=[
        "containers add up",
        "a bigger init container counts instead",
        "sidecars run beside the containers",
        "an init container runs beside the sidecars before it",
        "overhead comes on top",
        "requests of the whole pod replace the sum",
        "no requests",
    ],
)
def test_what_a_pod_takes(spec: dict[str, Any], cpu: float) -> None:
    assert pod_requests(JsonObject(spec)).get("cpu", 0) == cpu
