"""What Kueue is asked for by a Workload, and what its answer makes of the pods."""

import json
from typing import Any

import pytest

from grpo_operator.admission.spec_checks import queue_problem
from grpo_operator.kueue.pod_sets import (
    Contradiction,
    place_job,
    plan_of_workload,
    pod_sets,
    shape,
)
from grpo_operator.kueue.workload_manifest import Priority, queue_patch, workload
from grpo_operator.pods.manifests import attempt_of, engines_job, indexed_job
from grpo_operator.records.names import workload_name
from grpo_operator.records.workloads import PodSetUpdate
from tests.unit.kueue_world import QUEUED, admitted, make_workload
from tests.unit.operator_world import (
    GPU_PLAN,
    KEY,
    PLAN,
    PODS,
    SERVED_GPU_PLAN,
    SERVED_PLAN,
    UID,
    make_job,
)

GPU_QUEUED = {"placement": {"accelerator": "GPU", "queueName": "team"}}


def sets(plan: Any = PLAN, **spec: Any) -> list[dict[str, Any]]:
    job = make_job({**QUEUED, **spec})
    assert job.spec
    return pod_sets(job.key, job.spec, plan, PODS)


def test_one_workload_of_the_grpojob_has_a_pod_set_for_each_role() -> None:
    job = make_job(GPU_QUEUED)
    body = workload(job, SERVED_GPU_PLAN, Priority(7, "WorkloadPriorityClass", "high"), PODS)
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("GRPOJob", UID, True)
    spec = body["spec"]
    assert [(one["name"], one["count"]) for one in spec["podSets"]] == [
        ("trainer", 2),
        ("engine", 2),
    ]
    gpus = [
        one["template"]["spec"]["containers"][0]["resources"]["limits"] for one in spec["podSets"]
    ]
    assert [one["nvidia.com/gpu"] for one in gpus] == ["4", "2"]
    assert not any("minCount" in one for one in spec["podSets"])
    assert (spec["queueName"], spec["priority"]) == ("team", 7)
    kind = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    assert spec["priorityClassRef"] == kind
    assert [one["template"]["metadata"] for one in spec["podSets"]] == [
        {"labels": {}, "annotations": {}}
    ] * 2


def test_a_priority_of_no_class_is_a_number_alone() -> None:
    assert "priorityClassRef" not in workload(make_job(QUEUED), PLAN, Priority(), PODS)["spec"]
    assert queue_patch(make_job(QUEUED), Priority())["spec"]["priorityClassRef"] is None
    of_pods = queue_patch(make_job(QUEUED), Priority(3, "PriorityClass", "low"))["spec"][
        "priorityClassRef"
    ]
    assert of_pods["group"] == "scheduling.k8s.io"


def test_a_workload_remembers_its_plan() -> None:
    found = plan_of_workload(
        make_workload(plan=GPU_PLAN, job=make_job(GPU_QUEUED, {"attempt": 3}, generation=5))
    )
    assert found
    assert (found.plan, found.attempt, found.generation) == (GPU_PLAN, 3, 5)


def test_the_name_of_a_workload_is_short_and_its_jobs_own() -> None:
    names = {workload_name("x" * 52, uid) for uid in ("a", "b")}
    assert len(names) == 2
    assert max(map(len, names)) <= 63


@pytest.mark.parametrize(
    "spec",
    [
        {"resources": {"requests": {"cpu": "3"}}},
        {"placement": {**QUEUED["placement"], "nodeSelector": {"pool": "a"}}},
        {"placement": {**QUEUED["placement"], "tolerations": [{"key": "a", "operator": "Exists"}]}},
        {
            "podTemplate": {
                "metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}
            }
        },
        {"podTemplate": {"spec": {"runtimeClassName": "kata"}}},
    ],
)
def test_what_quota_and_place_depend_on_is_another_shape(spec: dict[str, Any]) -> None:
    assert shape(sets()) != shape(sets(**spec))


def test_what_only_the_program_sees_is_the_same_shape() -> None:
    assert shape(sets()) == shape(
        sets(env=[{"name": "A", "value": "b"}], image="other:2", command=["true"])
    )
    assert (
        len(
            {
                shape(sets(plan))
                for plan in (PLAN, SERVED_PLAN, PLAN.model_copy(update={"nodes": 3}))
            }
        )
        == 3
    )


def test_a_place_in_a_topology_is_asked_for_by_annotations_of_the_pods() -> None:
    given = {
        "required-topology": "rack",
        "slice-required-topology": "host",
        "slice-size": "2",
        "group-name": "all",
    }
    annotations = {f"kueue.x-k8s.io/podset-{name}": value for name, value in given.items()}
    (found,) = sets(podTemplate={"metadata": {"annotations": annotations}})
    assert found["topologyRequest"] == {
        "required": "rack", "podSetSliceRequiredTopology": "host", "podSetSliceSize": 2,
        "podSetGroupName": "all",
        "podIndexLabel": "batch.kubernetes.io/job-completion-index",
    }  # fmt: skip
    (found,) = sets(
        podTemplate={
            "metadata": {"annotations": {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}}
        }
    )
    assert found["topologyRequest"]["unconstrained"] is True
    assert sets()[0]["topologyRequest"] == {
        "podIndexLabel": "batch.kubernetes.io/job-completion-index"
    }
    (found,) = sets(
        podTemplate={"metadata": {"annotations": {"kueue.x-k8s.io/podset-group-name": "all"}}}
    )
    assert "podSetGroupName" not in found["topologyRequest"], "Kueue takes it with another alone"


FLAVOR = PodSetUpdate(
    node_selector={"cloud/pool": "spot"},
    tolerations=({"key": "spot", "operator": "Exists"},),
    source="ResourceFlavor spot",
)


def template(
    status: dict[str, Any], *flavors: PodSetUpdate, engines: bool = False
) -> dict[str, Any]:
    """The pods of a role where Kueue wants them."""
    plan = SERVED_PLAN if engines else PLAN
    job = make_job({**QUEUED, "podTemplate": {"metadata": {"labels": {"team": "a"}}}})
    assert job.spec
    attempt = attempt_of(job, job.spec, plan, 1)
    body = engines_job(attempt, PODS) if engines else indexed_job(attempt, PODS)
    assert body
    before = json.dumps(body)
    found: dict[str, Any] = place_job(body, make_workload(status, plan=plan), flavors)["spec"][
        "template"
    ]
    assert json.dumps(body) == before
    return found


def asked(**update: Any) -> dict[str, Any]:
    """A status in which an admission check asks that of the training pods."""
    return admitted(
        admissionChecks=[{"name": "nodes", "podSetUpdates": [{"name": "trainer", **update}]}]
    )


def test_flavors_and_admission_checks_are_merged_into_the_pods() -> None:
    update = {
        "labels": {"x": "1"}, "annotations": {"y": "2"}, "nodeSelector": {"z": "3"},
        "tolerations": [{"key": "z", "operator": "Exists"}],
    }  # fmt: skip
    found = template(asked(**update), FLAVOR)
    assert found["spec"]["nodeSelector"] == {"cloud/pool": "spot", "z": "3"}
    assert [one["key"] for one in found["spec"]["tolerations"]] == ["spot", "z"]
    labels, annotations = found["metadata"]["labels"], found["metadata"]["annotations"]
    assert (labels["x"], labels["team"], labels["kueue.x-k8s.io/podset"]) == ("1", "a", "trainer")
    assert (annotations["y"], annotations["kueue.x-k8s.io/workload"]) == ("2", make_workload().name)
    assert "grpo.dev/plan" in annotations
    assert "schedulingGates" not in found["spec"]
    other = template(asked(**update), engines=True)
    assert (other["metadata"]["labels"]["kueue.x-k8s.io/podset"],
    "x" in other["metadata"]["labels"]) == (
        "engine", False,
    )  # fmt: skip


def test_pods_with_a_place_in_a_topology_wait_for_the_ungater() -> None:
    assignment = {"name": "trainer", "flavors": {}, "topologyAssignment": {"levels": ["host"]}}
    found = template(admitted() | {"admission": {"podSetAssignments": [assignment]}})
    assert found["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
    assert (
        found["metadata"]["annotations"]["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"
    )


@pytest.mark.parametrize(
    "update",
    [
        {"nodeSelector": {"cloud/pool": "reserved"}},
        {"labels": {"grpo.dev/job-uid": "another"}},
        {"labels": {"team": "b"}},
        {"annotations": {"grpo.dev/plan": "{}"}},
    ],
)
def test_what_contradicts_a_flavor_or_the_pods_own_words_starts_nothing(
    update: dict[str, Any],
) -> None:
    with pytest.raises(Contradiction, match="disagree on"):
        template(asked(**update), FLAVOR)


@pytest.mark.parametrize(
    ("label", "placement", "words"),
    [
        ("a", {"queueName": "b"}, "'a' is another queue than spec.placement.queueName 'b'"),
        ("Team_A", {}, "'Team_A' is no name of a LocalQueue"),
        (
            "a",
            {"provisioning": "CreatePods"},
            "can't go with spec.placement.provisioning CreatePods",
        ),
    ],
)
def test_a_queue_name_that_can_not_be_meant_is_refused(
    label: str, placement: dict[str, Any], words: str
) -> None:
    declared = {"gpuProduct": "NVIDIA-L4", "gpusPerNode": 1, "nodes": 1, "nodeSelector": {"a": "b"}}
    more = {"accelerator": "GPU", **declared} if "provisioning" in placement else {}
    job = make_job(
        {"placement": {**more, **placement}}, labels={"kueue.x-k8s.io/queue-name": label}
    )
    problem = queue_problem(job)
    assert problem
    assert problem[0] == "InvalidSpec"
    assert problem[1].startswith("metadata.labels[kueue.x-k8s.io/queue-name]: ")
    assert words in problem[1]
    assert "allowed" in problem[1]


@pytest.mark.parametrize(("label", "placed_in"), [("a", None), ("a", "a"), ("", "a")])
def test_the_queue_is_the_labels_or_the_placements(label: str, placed_in: str | None) -> None:
    job = make_job(
        {"placement": {"queueName": placed_in}}, labels={"kueue.x-k8s.io/queue-name": label}
    )
    assert queue_problem(job) is None
    assert job.queue_name == "a"
    assert job.spec
    assert job.spec.placement.queue_name == "a"
    assert not job.is_competing
    assert job.key == KEY
