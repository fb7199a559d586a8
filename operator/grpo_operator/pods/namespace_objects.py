"""Makes the Services and the NetworkPolicy that attempts of a namespace share, and checks who owns
an existing object.

A name proves nothing. A claim may be about to be deleted or belong to another job, and anybody may
create a Service of our name. Objects of others are never changed. The job waits, and a condition
says for what. Objects of ours that differ get a patch.

The Services are headless: ranks find rank 0 under one, and the engines under the other. The
NetworkPolicy limits traffic to the pods. A gang talks without a password on ports that NCCL and
gloo choose, so only its own pods may reach them. One policy can't say "of the same job" for all
jobs, so the namespace is the boundary.
"""

from collections.abc import Mapping, Sequence

from grpo_api.text.contract import PROGRESS_PORT
from grpo_kube.objects.resources import merge_patch

from ..records.names import (
    COMPONENT_ENGINE,
    COMPONENT_ISOLATION,
    COMPONENT_RENDEZVOUS,
    ENGINE_SERVICE,
    LABEL_COMPONENT,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    MANAGER,
    NETWORK_POLICY,
    RENDEZVOUS_SERVICE,
)
from ..records.records import ClaimRecord, GRPOJobRecord, SharedRecord
from .pod_volumes import Manifest


def claim_problem(claim: ClaimRecord, job: GRPOJobRecord) -> str:
    """Why a job may not keep its checkpoints on a claim that has its claim's name; empty when it
    may.

    A claim that was retained when an earlier job of this name was deleted is taken: each job has a
    folder of its own.
    """
    name = f"PersistentVolumeClaim {claim.key.name}"
    if claim.deleting:
        return f"{name} is being deleted; waiting until it is gone (pods that use it keep it)"
    owner = claim.grpojob_uid
    if owner == job.uid:
        return ""
    if owner:
        return (
            f"{name} goes with its owner, uid {owner}, which is not this GRPOJob; waiting until it "
            "is gone"
        )
    is_managed = claim.labels.get(LABEL_MANAGED_BY) == MANAGER
    if is_managed and claim.labels.get(LABEL_JOB) == job.name:
        return ""
    return (
        f"{name} exists and was not made for this GRPOJob: to use it, name it in "
        "spec.checkpoint.volume of a new job; or delete it, or give the job another name"
    )


def is_ours(existing: SharedRecord, wanted: Manifest) -> bool:
    """True if an object of a name of ours was made by this operator, whatever has been changed of
    it since: it has one of our labels or, as a Service, our selector."""
    labels: Mapping[str, str] = wanted["metadata"]["labels"]
    if any(existing.labels.get(key) == value for key, value in labels.items()):
        return True
    selector = wanted["spec"].get("selector")
    return selector is not None and existing.spec.get("selector") == selector


def foreign_service(service: SharedRecord) -> str:
    """What is wrong where the Service is a stranger's."""
    return (
        f"Service {service.key.name} of this namespace is not the operator's (it has no label "
        f"{LABEL_COMPONENT}), and "
        "without theirs the ranks of a gang can't meet: delete it, and the operator makes its own"
    )


def foreign_policy(policy: SharedRecord) -> str:
    """Return the sentence that reports a NetworkPolicy of our name that is not the operator's."""
    return (
        f"NetworkPolicy {policy.key.name} of this namespace is not the operator's (it has no label "
        f"{LABEL_COMPONENT}), and stays as it is: delete it, and the operator makes its own, so "
        "that strangers don't reach the pods of jobs"
    )


def repair(existing: SharedRecord, wanted: Manifest) -> Manifest | None:
    """The merge patch that makes an object of ours what attempts need; None when it is."""
    patch: Manifest = {}
    labels: Mapping[str, str] = wanted["metadata"]["labels"]
    if not labels.items() <= existing.labels.items():
        patch["metadata"] = {"labels": labels}
    if spec := merge_patch(dict(existing.spec), wanted["spec"]):
        # A Service of another type is headless again without that type's fields only.
        if "clusterIP" in spec:
            spec |= {"type": "ClusterIP", "externalName": None}
        patch["spec"] = spec
    return patch or None


def wanted_service(namespace: str, name: str) -> Manifest:
    """The Service of this name as attempts need it: of the engines or the rendezvous."""
    return engine_service(namespace) if name == ENGINE_SERVICE else rendezvous_service(namespace)


def rendezvous_service(namespace: str) -> Manifest:
    """The headless Service under which rank 0 of every gang of the namespace has its name, ready or
    not.

    It selects only pods with index 0: every further endpoint costs kube-controller-manager an
    update per pod.
    """
    selector = {LABEL_MANAGED_BY: MANAGER, LABEL_INDEX: "0"}
    return _service(namespace, RENDEZVOUS_SERVICE, selector)


def engine_service(namespace: str) -> Manifest:
    """The headless Service under which all engine pods have names, ready or not."""
    selector = {LABEL_MANAGED_BY: MANAGER, LABEL_COMPONENT: COMPONENT_ENGINE}
    return _service(namespace, ENGINE_SERVICE, selector)


def _service(namespace: str, name: str, selector: dict[str, str]) -> Manifest:
    labels = {LABEL_MANAGED_BY: MANAGER, LABEL_COMPONENT: COMPONENT_RENDEZVOUS}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }


def network_policy(namespace: str, watchers: Sequence[Manifest]) -> Manifest:
    """Lets our pods of the namespace reach each other, and `watchers`, peers of
    networking.k8s.io/v1, PROGRESS_PORT.

    What pods may ask for stays open: hubs, object stores and reward services are anywhere.
    """
    our_pods = {"matchLabels": {LABEL_MANAGED_BY: MANAGER}}
    rules: list[Manifest] = [{"from": [{"podSelector": our_pods}]}]
    if watchers:  # without a `from` it would be everybody
        progress_port = {"protocol": "TCP", "port": PROGRESS_PORT}
        rules.append({"from": list(watchers), "ports": [progress_port]})
    labels = {LABEL_MANAGED_BY: MANAGER, LABEL_COMPONENT: COMPONENT_ISOLATION}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NETWORK_POLICY, "namespace": namespace, "labels": labels},
        "spec": {"podSelector": our_pods, "policyTypes": ["Ingress"], "ingress": rules},
    }
