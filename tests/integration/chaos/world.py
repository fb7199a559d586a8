"""The cluster that chaos is let loose on: nodes of two GPU products and CPUs, three teams, and
whoever acts in them.

Everything here goes directly to the API server; only the operators' way leads through the proxy.
"""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grpo_api.text.contract import API_VERSION, PLAN_ANNOTATION
from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_JOB, LABEL_UID
from harness.client import ApiClient, ApiStatusError
from harness.cluster import Cluster
from harness.programs.processes import until
from harness.settings import GpuSettings

from ..api_proxy import ApiProxy
from .ledger import Ledger
from .operator_process import Replicas
from .progress_server import ProgressServer

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
TEAMS = ("red", "green", "blue")
NODES = "/api/v1/nodes"
GRPOJOBS = f"/apis/{API_VERSION}/namespaces/{{}}/grpojobs"
ALL_GRPOJOBS = f"/apis/{API_VERSION}/grpojobs"
JOBS = "/apis/batch/v1/namespaces/{}/jobs"
PODS = "/api/v1/namespaces/{}/pods"
SERVICES = "/api/v1/namespaces/{}/services"
QUOTAS = "/api/v1/namespaces/{}/resourcequotas"
CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"
EVENTS = "/api/v1/namespaces/{}/events"
SILENT = "kwok.test/silent"
TEST_SECONDS = 60.0

H100 = GpuSettings(4)
A100 = GpuSettings(8, "NVIDIA-A100-SXM4-80GB", 81920, "ampere")
GPU_NODES: dict[str, GpuSettings] = {
    "h100-0": H100, "h100-1": H100, "h100-2": H100, "a100-0": A100, "a100-1": A100,
    "cpu-0": GpuSettings(), "cpu-1": GpuSettings(), "cpu-2": GpuSettings(), "cpu-3": GpuSettings(),
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Undo:
    """What ends a fault that lasts, once so many further faults have struck."""

    strikes_left: int
    act: Callable[[], object]


class World:
    """All that faults act on."""

    def __init__(
        self,
        cluster: Cluster,
        proxy: ApiProxy,
        progress: ProgressServer,
        operators: Replicas,
        ledger: Ledger,
    ) -> None:
        """The cluster knows GRPOJobs; nodes and namespaces are made by `found`."""
        self.cluster, self.proxy, self.progress = cluster, proxy, progress
        self.operators, self.ledger = operators, ledger
        self.client: ApiClient = cluster.control_plane.client()
        self._undo: list[Undo] = []

    def create(self) -> None:
        """Makes the nodes and the teams' namespaces."""
        self.cluster.add_kwok_nodes(0, 0)
        for name in GPU_NODES:
            self.add_node(name)
        for team in TEAMS:
            self.client.request("POST", "/api/v1/namespaces", {"metadata": {"name": team}})
        for team in TEAMS:
            path = f"/api/v1/namespaces/{team}/serviceaccounts/default"
            until(
                f"{team}'s service account", functools.partial(self.client.get, path), TEST_SECONDS
            )

    def add_node(self, name: str) -> None:
        """A node that only pretends; it is Ready a moment later."""
        gpus = GPU_NODES[name]
        offers = {
            "cpu": "64",
            "memory": "1Ti",
            "pods": "256",
            "ephemeral-storage": "1Ti",
            **gpus.capacity,
        }
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **gpus.labels}
        metadata = {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": labels}
        status = {"capacity": offers, "allocatable": offers}
        self.client.request("POST", NODES, {"metadata": metadata, "status": status})

    def get(self, path: str, namespace: str = "", name: str = "") -> Object:
        """An object, or a list; `{}` in the path is the namespace."""
        item: Object = self.client.get(path.format(namespace) + (f"/{name}" if name else ""))
        return item

    def items(self, path: str, namespace: str = "", query: str = "") -> list[Object]:
        """The objects of a list, by namespace and name."""
        items: list[Object] = self.client.get(path.format(namespace) + query)["items"]
        return sorted(
            items, key=lambda one: (one["metadata"].get("namespace", ""), one["metadata"]["name"])
        )

    def post(self, path: str, namespace: str, body: Object) -> Object:
        """Creates an object."""
        created: Object = self.client.request("POST", path.format(namespace), body)
        return created

    def patch(self, path: str, namespace: str, name: str, body: Object) -> Object:
        """Merge-patches an object; the name may end in a subresource."""
        patched: Object = self.client.request(
            "PATCH", f"{path.format(namespace)}/{name}", body, MERGE
        )
        return patched

    def delete(self, path: str, namespace: str, name: str, **options: Any) -> None:
        """Deletes an object; one that is gone is no error."""
        try:
            self.client.request("DELETE", f"{path.format(namespace)}/{name}", options)
        except ApiStatusError as error:
            if error.status != 404:
                raise

    def delete_job(self, job: Object, policy: str, faults: int) -> None:
        """Deletes a GRPOJob; who orphans its children clears them away so many faults later."""
        metadata = job["metadata"]
        if policy == "Orphan":
            self.undo_after(
                faults, lambda: self._clear_orphans(metadata["namespace"], metadata["uid"])
            )
        self.delete(GRPOJOBS, metadata["namespace"], metadata["name"], propagationPolicy=policy)

    def _clear_orphans(self, namespace: str, uid: str) -> None:
        for one in self.items(JOBS, namespace, f"?labelSelector={LABEL_UID}={uid}"):
            self.delete(JOBS, namespace, one["metadata"]["name"], propagationPolicy="Background")
        for one in self.items(PODS, namespace, f"?labelSelector={LABEL_UID}={uid}"):
            self.delete(PODS, namespace, one["metadata"]["name"], gracePeriodSeconds=0)

    def reconnect(self) -> None:
        """A new connection, for the server at the end of the old one is gone."""
        self.client = self.cluster.control_plane.client()

    def jobs(self, *phases: str) -> list[Object]:
        """The GRPOJobs that nobody has deleted, in these phases or in any."""
        jobs = [
            one for one in self.items(ALL_GRPOJOBS) if "deletionTimestamp" not in one["metadata"]
        ]
        return [one for one in jobs if not phases or one.get("status", {}).get("phase") in phases]

    def pods_of(self, job: Object, attempt: int | None = None) -> list[Object]:
        """The pods that were made for a job's attempt (the current one), by name; strangers with
        its labels are not."""
        number = job.get("status", {}).get("attempt", 0) if attempt is None else attempt
        labels = f"{LABEL_UID}={job['metadata']['uid']},{LABEL_ATTEMPT}={number}"
        pods = self.items(PODS, job["metadata"]["namespace"], f"?labelSelector={labels}")
        return [pod for pod in pods if PLAN_ANNOTATION in pod["metadata"].get("annotations", {})]

    def some_gang(self, chance: random.Random) -> tuple[Object, list[Object]] | None:
        """A job and its current pods that run, or None while there is none."""
        jobs = self.jobs("Running", "Starting", "Restarting")
        chance.shuffle(jobs)
        for job in jobs:
            if pods := [
                pod
                for pod in self.pods_of(job)
                if live(pod) and pod["status"]["phase"] == "Running"
            ]:
                return job, pods
        return None

    def undo_after(self, faults: int, act: Callable[[], object]) -> None:
        """Ends a fault when so many others have struck."""
        self._undo.append(Undo(faults, act))

    def struck(self) -> None:
        """One more fault has struck: ends those whose time is over.

        Raises ApiStatusError when the API server is not itself yet; the rest is ended next time.
        """
        for one in self._undo:
            one.strikes_left -= 1
        for one in [one for one in self._undo if one.strikes_left <= 0]:
            one.act()
            self._undo.remove(one)

    def undo_all(self) -> None:
        """Ends all faults that last, the newest first."""
        while self._undo:
            self._undo[-1].act()
            self._undo.pop()

    def all_of(self, path: str) -> Iterator[Object]:
        """The objects of a kind in all teams' namespaces."""
        for team in TEAMS:
            yield from self.items(path, team)


def live(pod: Object) -> bool:
    """Whether the pod runs or may still run, and nobody has told it to end."""
    return (
        pod["status"].get("phase") not in ("Succeeded", "Failed")
        and "deletionTimestamp" not in pod["metadata"]
    )


def of_a_job(pod: Object) -> bool:
    """Whether a pod says that it belongs to a GRPOJob."""
    return LABEL_JOB in pod["metadata"].get("labels", {})


def quiet(act: Callable[[], object]) -> bool:
    """Whether it could be done: what it was meant for may just have gone, or be refused."""
    try:
        act()
    except ApiStatusError:
        return False
    return True
