"""What has been: every version of every GRPOJob, every pod and node, as the API server told the
observer. Pure."""

from dataclasses import dataclass, field, replace
from typing import Any

from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_UID

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"
ENDED = ("Succeeded", "Failed")
UNKNOWN_PHASE = "Draining"
"""Of a newer version; the definition is widened by it, as after a rollback of the operator
alone."""
JUDGED = (
    "phase", "attempt", "retry", "restarts", "uncountedRestarts", "rollbacks", "conditions", "ends",
    "completionTime", "observedGeneration",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Version:
    """A GRPOJob as it was from this time (unix seconds) on."""

    at: float
    generation: int
    spec: Object
    status: Object
    gap: bool = False
    """Whether versions before it may have been missed."""

    def condition(self, kind: str) -> Object:
        """The condition; empty when it was never written."""
        return next((one for one in self.status.get("conditions", []) if one["type"] == kind), {})

    def true(self, kind: str) -> bool:
        """Whether the condition is True."""
        return bool(self.condition(kind).get("status") == "True")

    @property
    def attempt(self) -> int:
        """status.attempt."""
        return int(self.status.get("attempt", 0))

    @property
    def restarts(self) -> int:
        """status.restarts."""
        return int(self.status.get("restarts", 0))

    @property
    def phase(self) -> str:
        """status.phase."""
        return str(self.status.get("phase", ""))

    @property
    def finished(self) -> bool:
        """Whether it has succeeded or failed for good."""
        return self.true("Succeeded") or self.true("Failed")

    @property
    def active(self) -> bool:
        """Whether an attempt is admitted."""
        return self.true("Admitted") and not self.finished and self.attempt > 0

    @property
    def gpus(self) -> tuple[str, int]:
        """Product and number of GPUs that the plan takes."""
        plan = self.status.get("plan") or {}
        return plan.get("gpuProduct", ""), plan.get("nodes", 0) * plan.get("gpusPerNode", 0)


@dataclass(slots=True)
class Job:
    """A GRPOJob from its creation to its deletion."""

    uid: str
    name: str
    """`namespace/name`."""
    versions: list[Version] = field(default_factory=list)
    told_at: float | None = None
    """When its deletion was asked for."""
    gone_at: float | None = None
    vanished: bool = False
    """Whether it went between two watches, so that its last versions may have been missed."""
    lost: set[str] = field(default_factory=set)
    """Attempts with a pod that the node controller held for lost, as it also does with nodes that
    nobody struck."""

    @property
    def last(self) -> Version:
        """Its last version."""
        return self.versions[-1]


@dataclass(slots=True)
class Pod:
    """A pod from its creation to its end."""

    name: str
    job: str
    """uid of the GRPOJob that it was made for; empty for others, whatever their labels say."""
    attempt: str
    gpus: int
    seen_at: float
    node: str = ""
    bound_at: float = 0.0
    phase: str = ""
    told_at: float | None = None
    """When it was told to end."""

    @property
    def holds(self) -> bool:
        """Whether it may still hold what it requests."""
        return self.phase not in ENDED

    @property
    def live(self) -> bool:
        """Whether it runs or may still run, and nobody has told it to end."""
        return self.holds and self.told_at is None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node offered from this time on: no GPUs while it is not to be used."""

    at: float
    product: str
    gpus: int


class History:
    """Filled by the observer, one event at a time."""

    def __init__(self) -> None:
        """Nothing has been seen."""
        self.jobs: dict[str, Job] = {}
        """All that there have been."""
        self.pods: dict[str, Pod] = {}
        """Those that there are."""
        self.nodes: dict[str, list[Offer]] = {}

    def see(
        self, plural: str, item: Object, at: float, *, gone: bool = False, gap: bool = False
    ) -> None:
        """An object as it is now; `gone`: as it was when it went."""
        if plural == "grpojobs":
            self._see_job(item, at, gone, gap)
        elif plural == "pods":
            self._see_pod(item, at, gone)
        else:
            self._see_node(item, at, gone)

    def listed(self, plural: str, uids: set[str], at: float) -> None:
        """A full LIST: what it lacks went unnoticed."""
        if plural == "grpojobs":
            for uid, job in self.jobs.items():
                if uid not in uids and job.gone_at is None:
                    job.gone_at, job.vanished = at, True
        if plural == "pods":
            self.pods = {uid: pod for uid, pod in self.pods.items() if uid in uids}

    def _see_job(self, item: Object, at: float, gone: bool, gap: bool) -> None:
        metadata = item["metadata"]
        job = self.jobs.setdefault(
            metadata["uid"], Job(metadata["uid"], f"{metadata['namespace']}/{metadata['name']}")
        )
        version = Version(
            at, metadata["generation"], item["spec"], _judged(item.get("status", {})), gap
        )
        if job.versions and version.spec == job.last.spec:
            version = replace(version, spec=job.last.spec)  # one copy of what hardly ever changes
        if not job.versions or (version.generation, version.status) != (
            job.last.generation,
            job.last.status,
        ):
            job.versions.append(version)
        if "deletionTimestamp" in metadata or gone:
            job.told_at = job.told_at or at
        if gone:
            job.gone_at = at

    def _see_pod(self, item: Object, at: float, gone: bool) -> None:
        metadata, spec, labels = (
            item["metadata"],
            item["spec"],
            item["metadata"].get("labels", {}),
        )
        gpus = sum(
            int(one.get("resources", {}).get("limits", {}).get(GPU, 0))
            for one in spec["containers"]
        )
        ours = PLAN_ANNOTATION in metadata.get("annotations", {})
        fresh = Pod(
            metadata["name"],
            labels.get(LABEL_UID, "") if ours else "",
            labels.get(LABEL_ATTEMPT, ""),
            gpus,
            at,
        )
        pod = self.pods.setdefault(metadata["uid"], fresh)
        pod.phase = item.get("status", {}).get("phase", "")
        conditions = item.get("status", {}).get("conditions", [])
        unready = any(one["type"] == "Ready" and one["status"] == "False" for one in conditions)
        if unready and pod.phase == "Running" and pod.job in self.jobs:
            self.jobs[pod.job].lost.add(pod.attempt)
        if spec.get("nodeName") and not pod.node:
            pod.node, pod.bound_at = spec["nodeName"], at
        if "deletionTimestamp" in metadata or gone:
            pod.told_at = pod.told_at or at
        if gone:
            self.pods.pop(metadata["uid"])

    def _see_node(self, item: Object, at: float, gone: bool) -> None:
        metadata, status = item["metadata"], item.get("status", {})
        ready = any(
            one["type"] == "Ready" and one["status"] == "True"
            for one in status.get("conditions", [])
        )
        usable = ready and not gone and not item["spec"].get("unschedulable")
        gpus = int(status.get("allocatable", {}).get(GPU, 0)) if usable else 0
        offers = self.nodes.setdefault(metadata["name"], [])
        if not offers or offers[-1].gpus != gpus:
            offers.append(Offer(at, metadata.get("labels", {}).get(PRODUCT, ""), gpus))

    def ended_unread(self, job: Job) -> bool:
        """Whether the gang of a job ended while its status was unreadable, so that nobody could
        tell that it did."""
        number = job.last.attempt
        spoiled = any(one.phase == UNKNOWN_PHASE for one in job.versions if one.attempt == number)
        gang = [
            pod for pod in self.pods.values() if (pod.job, pod.attempt) == (job.uid, str(number))
        ]
        return spoiled and bool(gang) and not any(pod.holds for pod in gang)

    def capacity(self, product: str, since: float, until: float) -> int:
        """GPUs of the product that could be used at some moment of that time: each node's best."""
        return sum(self.best(name, product, since, until) for name in self.nodes)

    def best(self, node: str, product: str, since: float, until: float) -> int:
        """Most GPUs of the product that the node offered at some moment of that time."""
        offers = [
            one for one in self.nodes.get(node, []) if one.product == product and one.at <= until
        ]
        before = [one.gpus for one in offers if one.at <= since][-1:]
        return max(before + [one.gpus for one in offers if one.at > since], default=0)


def _judged(status: Object) -> Object:
    """The fields that something is judged by: a storm has thousands of versions."""
    found = {field: status[field] for field in JUDGED if field in status}
    if plan := status.get("plan"):
        found["plan"] = {field: plan.get(field) for field in ("nodes", "gpusPerNode", "gpuProduct")}
    return found
