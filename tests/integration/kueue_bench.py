"""A bench with Kueue's kinds and a stand-in for its manager: GRPOJobs that wait for a queue, and
what that gives."""

from typing import Any

from grpo_api.text.contract import API_VERSION, KIND
from harness.client import ApiClient, ApiStatusError
from harness.fixtures import AnyCluster
from tests.integration.gpu_bench import GpuBench
from tests.integration.kueue_queues import QUEUE, RealQueues
from tests.integration.kueue_stand_in import KueueStandIn
from tests.integration.kueue_writes import Workload
from tests.integration.operator_bench import GRPOJOBS, SPEC, Object, outcome

FLAVORS = "/apis/kueue.x-k8s.io/v1beta2/resourceflavors"
PRIORITIES = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


class KueueBench(GpuBench):
    """A namespace whose GRPOJobs wait for Kueue; its flavor and its priority classes carry the
    namespace's name."""

    def __init__(
        self,
        cluster: AnyCluster,
        client: ApiClient,
        *,
        real: bool = False,
        levels: tuple[str, ...] = (),
    ) -> None:
        """Makes the namespace and its flavor, which says nothing; `real`: and the real queues, with
        these levels."""
        super().__init__(cluster, client)
        api_client: ApiClient = cluster.control_plane.client()  # type: ignore[union-attr]
        self._made: list[str] = []
        if real:
            self.kueue: KueueStandIn = RealQueues(api_client, self.namespace, 4, *levels)
        else:
            self.kueue = KueueStandIn(api_client, self.namespace, flavor=self.namespace)
            self.make(FLAVORS, "ResourceFlavor", self.namespace, spec={})

    def make(self, path: str, kind: str, name: str, **body: Any) -> None:
        """Makes an object outside namespaces, which ends with the bench."""
        made = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": kind,
            "metadata": {"name": name},
            **body,
        }
        self.client.request("POST", path, made)
        self._made.append(f"{path}/{name}")

    def priority(self, name: str, value: int) -> str:
        """A WorkloadPriorityClass of the namespace's own, by its whole name."""
        whole = f"{self.namespace}-{name}"
        self.make(PRIORITIES, "WorkloadPriorityClass", whole, value=value)
        return whole

    def give_flavor(self, **spec: Any) -> None:
        """What pods of the flavor get: nodeLabels, tolerations."""
        self.client.request(
            "PATCH", f"{FLAVORS}/{self.namespace}", {"spec": spec}, "application/merge-patch+json"
        )

    def end_all(self) -> None:
        """Takes away what is outside the namespace."""
        if isinstance(self.kueue, RealQueues):
            self.kueue.end()
        for path in self._made:
            try:
                self.client.request("DELETE", path)
            except ApiStatusError as error:
                if error.status != 404:
                    raise

    def submit(
        self, name: str = "run", labels: dict[str, str] | None = None, **spec: Any
    ) -> Object:
        """Creates a GRPOJob that Kueue's queue admits, or one with other labels than the
        queue's."""
        metadata = {"name": name, "labels": {QUEUE_LABEL: QUEUE} if labels is None else labels}
        return self.post(
            GRPOJOBS,
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": metadata,
                "spec": {**SPEC, **spec},
            },
        )

    def workload(self, name: str = "run") -> Workload:
        """Waits for the GRPOJob's Workload."""
        self.wait(f"the Workload of {name}", lambda: self.kueue.owned(name))
        return self.kueue.of(name)

    def given_back(self, name: str = "run") -> Workload:
        """Waits until the GRPOJob's Workload has no admission any more."""
        self.wait(
            f"the quota of {name} to be given back",
            lambda: not admission(self.kueue.of(name)),
            hurry=True,
        )
        return self.kueue.of(name)

    def succeed(self, name: str = "run", attempt: int = 1) -> None:
        """Lets the GRPOJob's attempt run, and all its pods succeed."""
        for pod in self.wait_running(name, attempt):
            self.end(pod, message=outcome("Succeeded"))
        self.wait_phase("Succeeded", name)

    def admit(self, name: str = "run", attempt: int = 1) -> list[Object]:
        """Admits the GRPOJob's Workload, waits until the attempt runs, and returns its pods."""
        self.workload(name)
        self.kueue.admit(name)
        return self.wait_running(name, attempt)


def admission(workload: Workload) -> Any:
    """What Kueue has given to it, if anything."""
    return workload.get("status", {}).get("admission")
