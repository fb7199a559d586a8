"""A claim for many nodes of a StorageClass that has disks is refused before a gang waits for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kube.objects.errors import Forbidden
from grpo_kube.objects.json_reader import Unreadable
from grpo_kube.objects.resources import CLAIMS, Resource
from grpo_operator.admission.storage_classes import (
    DISKS,
    StorageClass,
    provisioners,
    storage_class,
    storage_problem,
    unbindable_claim,
)
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.preflight import BLOCKED_SECONDS
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.preflights import Preflights
from grpo_operator.loop.shared_objects import SharedObjects
from grpo_operator.pods.pod_spec import PodDefaults
from tests.unit.operator_world import active_status, make_job, make_seen
from tests.unit.queue_world import cluster, judged, queue

EFS, EBS = "efs.csi.aws.com", "ebs.csi.aws.com"
AWS = [StorageClass("gp3", EBS, True), StorageClass("efs-sc", EFS, False)]


def claim(**more: Any) -> dict[str, Any]:
    return {"checkpoint": {"volumeClaimTemplate": {"size": "10Gi", **more}}}


def test_the_default_class_counts_where_the_job_names_none() -> None:
    problem = storage_problem(make_job(claim()), provisioners(AWS))
    assert problem is not None
    reason, message = problem
    assert reason == "StorageNotShared"
    assert message.startswith("spec.checkpoint.volumeClaimTemplate.accessMode: ReadWriteMany, but ")
    assert "StorageClass gp3 (ebs.csi.aws.com: Amazon EBS)" in message
    assert "such as Amazon EFS or FSx for Lustre (this cluster has efs-sc)" in message
    assert "accessMode to ReadWriteOnce" in message


@pytest.mark.parametrize(
    "spec",
    [
        claim(storageClassName="efs-sc"),
        claim(storageClassName="unknown"),
        claim(accessMode="ReadWriteOnce"),
        {"checkpoint": {"volume": {"claimName": "mine"}}},
        {},
    ],
)
def test_other_claims_are_left_alone(spec: dict[str, Any]) -> None:
    two_nodes = {"placement": {"accelerator": "CPU"}}
    assert storage_problem(make_job({**two_nodes, **spec}), provisioners(AWS)) is None


def test_two_default_classes_are_no_ground_for_a_refusal() -> None:
    classes = [*AWS, StorageClass("gp2", EBS, True)]
    assert storage_problem(make_job(claim()), provisioners(classes)) is None


def test_a_job_that_has_run_keeps_its_claim() -> None:
    job = make_job(claim(), active_status())
    assert storage_problem(job, provisioners(AWS)) is None


@given(
    made_by=st.sampled_from([*DISKS, EFS, "nfs.csi.k8s.io", "example.com/x"]),
    is_default=st.booleans(),
    is_named=st.booleans(),
)
def test_a_refusal_needs_a_known_disk(made_by: str, is_default: bool, is_named: bool) -> None:
    item = {
        "metadata": {
            "name": "standard",
            "annotations": {"storageclass.kubernetes.io/is-default-class": str(is_default).lower()},
        },
        "provisioner": made_by,
    }
    classes = provisioners([storage_class(item)])
    spec = claim(storageClassName="standard") if is_named else claim()
    is_refused = storage_problem(make_job(spec), classes) is not None
    assert is_refused == (made_by in DISKS and (is_named or is_default))


def a_claim(*modes: str, phase: str = "Pending", **spec: Any) -> dict[str, Any]:
    """A claim that somebody made, as the API server has it."""
    spec = {"accessModes": list(modes) or ["ReadWriteMany"], "storageClassName": "gp3", **spec}
    return {"metadata": {"name": "data"}, "spec": spec, "status": {"phase": phase}}


def test_a_claim_that_somebody_made_is_named_with_what_to_set() -> None:
    assert unbindable_claim(a_claim(), provisioners(AWS)) == (
        "StorageNotShared",
        "PersistentVolumeClaim data is ReadWriteMany, but StorageClass gp3 has volumes for one "
        "node at a time (Amazon EBS). Create it again, of a class such as Amazon EFS or FSx for "
        "Lustre (this cluster has efs-sc), or as ReadWriteOnce for a gang on one node",
    )


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteMany"])
def test_a_claim_of_a_class_that_is_not_there_is_named_with_those_that_are(mode: str) -> None:
    """The scheduler says only that a claim is unbound."""
    item = a_claim(mode, storageClassName="gp4")
    assert unbindable_claim(item, provisioners(AWS)) == (
        "StorageClassNotFound",
        "PersistentVolumeClaim data has no volume, and there is no StorageClass gp4 that makes one "
        "(this cluster has efs-sc, gp3). Create that class, or the claim again of another",
    )
    assert unbindable_claim(item, {}) is None, "the operator may not see classes"
    made_by_hand = a_claim(mode, storageClassName="gp4", phase="Bound")
    assert unbindable_claim(made_by_hand, provisioners(AWS)) is None


@pytest.mark.parametrize(
    "item",
    [
        a_claim("ReadWriteOnce"),
        a_claim(phase="Bound"),
        a_claim(storageClassName="efs-sc"),
        a_claim(storageClassName=""),
        a_claim(storageClassName=None),
        a_claim(volumeName="pv-made-by-hand"),
        a_claim(volumeMode="Block"),
        {},
    ],
)
def test_a_claim_that_may_get_a_volume_is_left_alone(item: dict[str, Any]) -> None:
    assert unbindable_claim(item, provisioners(AWS)) is None


@pytest.mark.parametrize("prefix", ["", "rook-ceph.", "openshift-storage."])
def test_a_ceph_block_device_is_a_disk_wherever_its_operator_runs(prefix: str) -> None:
    classes = provisioners([StorageClass("gp3", f"{prefix}rbd.csi.ceph.com", False)])
    problem = unbindable_claim(a_claim(), classes)
    assert problem is not None
    assert "(Ceph RBD). Create it again, of a class such as CephFS" in problem[1]


@given(made_by=st.sampled_from([*DISKS, EFS, "nfs.csi.k8s.io", "example.com/x"]))
def test_every_disk_of_the_table_counts_for_claims_that_exist(made_by: str) -> None:
    classes = provisioners([StorageClass("gp3", made_by, False)])
    problem = unbindable_claim(a_claim(), classes)
    assert (problem is not None) is (made_by in DISKS)
    assert problem is None or len(problem[1]) <= 300


@pytest.mark.parametrize("may_read", [True, False])
async def test_a_preflight_names_the_claim_before_it_starts(may_read: bool) -> None:
    gpus = {"placement": {"accelerator": "GPU", "nodes": None, "gpus": {"min": 1, "max": 1}}}
    job = make_job({**gpus, "checkpoint": {"volume": {"claimName": "data"}}})
    api: Any = Server(a_claim() if may_read else None)
    caches = Caches()
    shared = SharedObjects(api, caches, lambda: 0.0, None, lambda: provisioners(AWS))
    preflights = Preflights(api, caches, shared, PodDefaults(image="trainer:1", preflight=True))
    seen = make_seen(job)
    there = preflights.look(job, seen.now, seen.at)
    message = await preflights.start(replace(seen, preflight=there), None)
    problem = "PersistentVolumeClaim data is ReadWriteMany, but "
    assert message.startswith(problem if may_read else "GET persistentvolumeclaims/data: 403")
    assert there is not None
    check = replace(there, warning=message).check
    assert check.reason == "PreflightBlocked"
    assert check.message.endswith("the job's own pods would wait for the same")


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"name": "/models/tiny", "volume": {"claimName": "data"}}},
        {
            "dataset": {
                "name": None,
                "files": {"paths": ["a.jsonl"], "volume": {"claimName": "data"}},
            }
        },
        {
            "podTemplate": {
                "spec": {
                    "volumes": [{"name": "own", "persistentVolumeClaim": {"claimName": "data"}}]
                }
            }
        },
    ],
    ids=["model", "dataset", "own"],
)
async def test_inputs_on_a_claim_that_waits_for_its_first_pod_are_no_mistake(
    spec: dict[str, Any],
) -> None:
    """A snapshot, or a node's own disk, has its files before a claim is bound to it."""
    gpus = {"placement": {"accelerator": "GPU", "nodes": None, "gpus": {"min": 1, "max": 1}}}
    job = make_job({**gpus, **spec})
    assert job.spec is not None, job.problems
    api: Any = Server(a_claim("ReadWriteOnce", storageClassName="local-disks"))
    local_disks = StorageClass("local-disks", "kubernetes.io/no-provisioner", False)
    classes = provisioners([*AWS, local_disks])
    shared = SharedObjects(api, Caches(), lambda: 0.0, None, lambda: classes)
    preflights = Preflights(api, Caches(), shared, PodDefaults(image="trainer:1", preflight=True))
    seen = make_seen(job)
    there = preflights.look(job, seen.now, seen.at)
    assert there is not None
    message = await preflights.start(replace(seen, preflight=there), None)
    check = replace(there, warning=message).check
    assert check.reason == "PreflightBlocked"
    assert "claim data has no volume until a pod uses it" in check.message
    late = replace(there, warning=message, blocked_for=BLOCKED_SECONDS).check
    assert late.reason == "NotChecked"


class Server:
    """An API server with one claim, where nothing may be made."""

    def __init__(self, claim: dict[str, Any] | None) -> None:
        """`claim`: the answer to each question; None: the operator may not ask."""
        self._claim = claim

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any]:
        assert (resource, namespace, name) == (CLAIMS, "team-a", "data")
        if self._claim is None:
            raise Forbidden("GET persistentvolumeclaims/data: 403", 403)
        return self._claim


@pytest.mark.parametrize("item", [{}, {"metadata": {"name": 3}}, "x"])
def test_a_class_that_cannot_be_read_is_set_aside(item: object) -> None:
    with pytest.raises(Unreadable):
        storage_class(item)


async def test_a_job_on_cpus_is_refused_too() -> None:
    job = make_job(claim())
    there = cluster(storage_classes=provisioners(AWS))
    answer = await queue([job], there).answer(make_seen(job), Decision(Action.ADMIT))
    assert answer is not None
    assert (answer.action, answer.reason) == (Action.REJECT, "StorageNotShared")


async def test_a_gang_that_is_refused_takes_no_gpus() -> None:
    gang: dict[str, Any] = {
        "placement": {"accelerator": "GPU", "nodes": None, "gpus": {"min": 1, "max": 1}}
    }
    job = make_job({**claim(), **gang})
    verdict = judged([job], cluster(8, storage_classes=provisioners(AWS)))[job.uid]
    assert (verdict.refused, verdict.reason) == (True, "StorageNotShared"), verdict.message
