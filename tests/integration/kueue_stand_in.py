"""A stand-in for Kueue's manager: it writes on Workloads what the real one writes, when a test
wants it.

It can also play the manager by itself, with a quota of GPUs. test_kueue_manager.py puts the same
stories to it and to the real one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from harness.client import ApiClient, ApiStatusError
from harness.programs.processes import ClusterError
from tests.integration.kueue_writes import (
    GPU,
    Workload,
    admit,
    answer_check,
    checks,
    gpus,
    is_true,
    keep_waiting,
    message,
    owner,
    preempt,
    reserve,
    waits,
    what_follows,
)

MERGE = "application/merge-patch+json"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/{}/workloads"
COULD_NOT = "couldn't assign flavors to pod set"
Change = Callable[[Workload], None]
T = TypeVar("T")


class KueueStandIn:
    """Kueue's manager for one namespace: one ClusterQueue, to which every queue's name leads."""

    def __init__(
        self, client: ApiClient, namespace: str, quota: int = 4, flavor: str = "default"
    ) -> None:
        """The quota is in GPUs, all of the flavor. `check` may name an admission check that all
        must pass."""
        self.client = client
        self.quota = quota
        self.flavor = flavor
        self.check = ""
        self.most_used = 0
        self._path = WORKLOADS.format(namespace)
        self._error: BaseException | None = None

    def all(self) -> list[Workload]:
        """The Workloads, oldest first."""
        workloads: list[Workload] = self.client.get(self._path)["items"]
        return sorted(
            workloads,
            key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]),
        )

    def owned(self, job: str) -> list[Workload]:
        """Those whose controller is the GRPOJob."""
        return [one for one in self.all() if owner(one) == job]

    def of(self, job: str) -> Workload:
        """The GRPOJob's only one."""
        (workload,) = self.owned(job)
        return workload

    def create(self, name: str, **spec: object) -> Workload:
        """Makes a Workload without an owner."""
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {"name": name},
            "spec": spec,
        }
        made: Workload = self.client.request("POST", self._path, body)
        return made

    def change(self, workload: Workload, *changes: Change) -> Workload:
        """Changes its status in one write, whatever others write meanwhile."""
        path = f"{self._path}/{workload['metadata']['name']}"
        while True:
            stored: Workload = self.client.get(path)
            for change in changes:
                change(stored)
            try:
                written: Workload = self.client.request("PUT", f"{path}/status", stored)
            except ApiStatusError as error:
                if error.status != 409:
                    raise
            else:
                return written

    def tell(self, job: str, *changes: Change) -> Workload:
        """The same for the GRPOJob's Workload."""
        return self.change(self.of(job), *changes)

    def reserve(self, workload: Workload) -> None:
        """Reserves quota, whatever there is."""
        reserve(workload, "team-gpus", self.flavor)

    def admit(self, job: str) -> Workload:
        """Reserves quota and admits: two writes."""
        self.tell(job, self.reserve)
        return self.tell(job, admit)

    def set_active(self, workload: Workload, active: bool) -> None:
        """What a user or a policy does; the manager answers."""
        patch = {"spec": {"active": active}}
        self.client.request("PATCH", f"{self._path}/{workload['metadata']['name']}", patch, MERGE)

    def answer(self) -> bool:
        """Makes the manager's next write: what follows from a Workload alone, then quota, to the
        highest priority."""
        workloads = [one for one in self.all() if not is_true(one, "Finished")]
        for one in workloads:
            if one["spec"].get("active", True) and is_true(one, "DeactivationTarget"):
                self.set_active(one, active=False)
                return True
            if self.check and not checks(one):
                self.change(one, lambda found: answer_check(found, "Pending", name=self.check))
                return True
            if follows := what_follows(one):
                self.change(one, follows)
                return True
        held = [one for one in workloads if one.get("status", {}).get("admission")]
        self.most_used = max(self.most_used, sum(map(gpus, held)))
        return any(
            self._serve(one, held)
            for one in sorted(filter(waits, workloads), key=lambda one: -priority(one))
        )

    def until(self, what: str, probe: Callable[[], T]) -> T:
        """Lets the manager write until it has nothing more to say; what the probe asks for must
        hold then."""
        while self.answer():
            pass
        if not (result := probe()):
            raise ClusterError(f"{what}: got {result!r}")
        return result

    def _serve(self, one: Workload, held: list[Workload]) -> bool:
        """Gives it quota, or preempts the youngest whom it may, or says once that it waits."""
        free = self.quota - sum(map(gpus, held))
        weaker = [other for other in held if priority(other) < priority(one)]
        victims = [other for other in weaker if not is_true(other, "Evicted")]
        leaving = sum(gpus(other) for other in held if is_true(other, "Evicted"))
        if gpus(one) <= free:
            self.change(one, self.reserve)
        elif victims and free + leaving < gpus(one) <= free + sum(map(gpus, weaker)):
            self.change(victims[-1], preempt)
        elif COULD_NOT not in message(one, "QuotaReserved"):
            more = (
                f"insufficient unused quota for {GPU} in flavor {self.flavor}, "
                f"{gpus(one) - free} more needed"
            )
            self.change(one, lambda found: keep_waiting(found, f"{COULD_NOT}: {more}"))
        else:
            return False
        return True

    @contextmanager
    def managing(self) -> Iterator[None]:
        """The manager at work while the block runs; what it fails with is raised at the end."""
        stop = threading.Event()
        thread = threading.Thread(target=self._manage, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if self._error:
            raise self._error

    def _manage(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                wrote = self.answer()
            except ApiStatusError as error:
                wrote = error.status == 404  # deleted since it was listed
                if not wrote:
                    self._error = error
                    return
            stop.wait(0 if wrote else 0.05)


def priority(workload: Workload) -> int:
    """Of two the higher is served first."""
    value: int = workload["spec"].get("priority", 0)
    return value
