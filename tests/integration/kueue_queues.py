"""Queues of Kueue's real manager, as an administrator makes them for a namespace, and Workloads
made by hand."""

from collections.abc import Callable
from typing import Any, TypeVar

from harness.client import ApiClient, ApiStatusError
from harness.programs.processes import until
from tests.integration.kueue_stand_in import MERGE, KueueStandIn
from tests.integration.kueue_writes import GPU, Workload, said

T = TypeVar("T")
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
ADMITTED = {"QuotaReserved": ("True", "QuotaReserved"), "Admitted": ("True", "Admitted")}
WAITS = {"QuotaReserved": ("False", "Pending")}
RELEASED = {"QuotaReserved": ("False", "Pending"), "Admitted": ("False", "NoReservation")}
QUEUE, OTHER_QUEUE = "team", "other-team"
SECONDS = 60
PLENTY = {"cpu": "1000", "memory": "100Ti", "ephemeral-storage": "100Ti"}


class RealQueues(KueueStandIn):
    """The stand-in's questions put to the real manager, which writes by itself."""

    def __init__(self, client: ApiClient, namespace: str, quota: int = 4, *levels: str) -> None:
        """Makes a ResourceFlavor, a ClusterQueue that preempts lower priorities, and its
        LocalQueues.

        `levels` are node labels by which the flavor's nodes, those with the namespace's label
        `bench`, stand together.
        """
        super().__init__(client, namespace, quota, namespace)
        self.namespace = namespace
        self._made: list[str] = []
        flavor: dict[str, Any] = {}
        if levels:
            self._make("topologies", "Topology", {"levels": [{"nodeLabel": one} for one in levels]})
            flavor = {"topologyName": namespace, "nodeLabels": {"bench": namespace}}
        self._make("resourceflavors", "ResourceFlavor", flavor)
        self._make("clusterqueues", "ClusterQueue", self._cluster_queue())
        for name in (QUEUE, OTHER_QUEUE):
            local = {"metadata": {"name": name}, "spec": {"clusterQueue": namespace}}
            body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", **local}
            client.request("POST", f"{KUEUE}/namespaces/{namespace}/localqueues", body)

    def _make(
        self, plural: str, kind: str, spec: dict[str, Any], name: str = "", **more: Any
    ) -> None:
        """Makes an object outside namespaces, by the namespace's name."""
        metadata = {"name": name or self.namespace}
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": kind,
            "metadata": metadata,
            "spec": spec,
            **more,
        }
        self.client.request("POST", f"{KUEUE}/{plural}", body)
        self._made.append(f"{KUEUE}/{plural}/{metadata['name']}")

    def _cluster_queue(self) -> dict[str, Any]:
        quotas = [
            {"name": name, "nominalQuota": amount}
            for name, amount in {GPU: self.quota, **PLENTY}.items()
        ]
        flavors = [{"name": self.flavor, "resources": quotas}]
        return {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [
                {"coveredResources": [one["name"] for one in quotas], "flavors": flavors}
            ],
        }

    def require_check(self) -> None:
        """Holds admissions back until a check of the namespace's name, whose controller the test
        is, says yes."""
        self._make(
            "admissionchecks", "AdmissionCheck", {"controllerName": f"example.com/{self.namespace}"}
        )
        path = f"{KUEUE}/admissionchecks/{self.namespace}"
        active = {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": "the test answers",
        }
        active["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        self.client.request("PATCH", f"{path}/status", {"status": {"conditions": [active]}}, MERGE)
        strategy = {"admissionChecks": [{"name": self.namespace}]}
        queue = f"{KUEUE}/clusterqueues/{self.namespace}"
        self.client.request("PATCH", queue, {"spec": {"admissionChecksStrategy": strategy}}, MERGE)
        self.check = self.namespace

    def until(self, what: str, probe: Callable[[], T]) -> T:
        """Waits until the manager has written it."""
        result: T = until(f"{what} in {self.namespace}", probe, SECONDS)
        return result

    def end(self) -> None:
        """Deletes what is outside the namespace; the manager's finalizers let go once the queue is
        empty."""
        for path in reversed(self._made):
            try:
                self.client.request("DELETE", path)
            except ApiStatusError as error:
                if error.status != 404:
                    raise


def make_workload(
    kueue: KueueStandIn, name: str, gpus: int = 4, pods: int = 1, **spec: Any
) -> Workload:
    """A Workload without an owner, of one podSet."""
    requests = {"cpu": "1", GPU: str(gpus // pods)}
    container = {
        "name": "c",
        "image": "x",
        "resources": {"limits": {GPU: requests[GPU]}, "requests": requests},
    }
    pod = {"restartPolicy": "Never", "containers": [container]}
    return kueue.create(
        name,
        queueName=QUEUE,
        podSets=[{"name": "trainer", "count": pods, "template": {"spec": pod}}],
        **spec,
    )


def named(kueue: KueueStandIn, name: str) -> Workload:
    """The Workload of that name."""
    (match,) = [one for one in kueue.all() if one["metadata"]["name"] == name]
    return match


def wait_said(kueue: KueueStandIn, name: str, **conditions: tuple[str, str]) -> Workload:
    """Until the Workload says all these, each by status and reason."""

    def says() -> Workload | None:
        one = named(kueue, name)
        return (
            one if all(said(one, kind) == wanted for kind, wanted in conditions.items()) else None
        )

    workload = kueue.until(f"{name}: {conditions}", says)
    assert workload
    return workload
