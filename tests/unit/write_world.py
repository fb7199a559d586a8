"""A cluster in which single writes of the operator fail, driven as the operator's process is: a job
is reconciled when an event, a deadline or a failure calls for it, and never for another reason.

The loop is the real one (loop/reconcile.py). A small model of Kubernetes' controllers, of Kueue's
manager and of trainers answers it, in virtual time.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.cache import Cache, has_same_content, version_of
from grpo_kube.objects.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    NotFound,
    Unavailable,
)
from grpo_kube.objects.resources import (
    JOBS,
    PODS,
    SERVICES,
    Object,
    ObjectKey,
    Resource,
    Selection,
)
from grpo_kube.objects.times import doubled_pause
from grpo_kube.work_queue import ECHO_DELAY, FIRST_RETRY, LAST_RETRY
from grpo_operator.admission.queue import _decision
from grpo_operator.admission.scheduler import Verdict, hold_until_checked
from grpo_operator.decide.decisions import Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.kueue.workload_steps import gate_by_workload
from grpo_operator.loop.caches import Caches
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.names import (
    COMPONENT_ENGINE,
    COMPONENT_PREFLIGHT,
    COMPONENT_TRAINER,
    GRPOJOBS,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_CONTROLLER,
    LABEL_UID,
    RESOURCE_FLAVORS,
    WORKLOADS,
)
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.events import telling_change
from tests.integration import kueue_writes
from tests.unit import reconcile_world
from tests.unit.operator_world import KEY, NOW, at, pod_object, said, terminated

T = TypeVar("T")
Act = Callable[["World"], None]
Story = tuple[tuple[str, Act], ...]
"""What others do, one after the other, each as soon as the job has come to that moment."""

FAULTS = ("conflict", "not found", "denied", "unavailable", "lost", "lost conflict")
"""`lost`: the API server takes the write, and no answer comes; `lost conflict`: as the client's own
second try then says."""
DEATHS = ("death", "death after")
"""The operator's process ends before or after the write, and another one goes on."""
STEP = 60.0
"""Seconds that a gang trains, and a preflight takes."""
ENDED = ("Succeeded", "Failed")
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
WELL = terminated(0, said("Succeeded", step=9))
BAD = terminated(41, said("Error", message="no luck"))


class Death(Exception):
    """The operator's process ends."""


class Admission:
    """A queue that admits the job by its plan at once, or as Kueue and its preflight let it."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def record_job(self, *_: Any) -> None:
        """Nobody else competes."""

    def release_denied(self, *_: Any) -> None:
        """Nobody waits for its place."""

    async def answer(self, seen: Observation, decision: Decision) -> Decision:
        plan, job = self.world.plan, seen.job
        verdict = Verdict(generation=job.generation, plan=plan, admitted=True, message="fits")
        verdict = hold_until_checked(job, verdict, preflight=True)
        answer = _decision(decision, verdict)
        return gate_by_workload(seen, answer, self.world.pods) if job.queue_name else answer


class World(reconcile_world.Cluster):
    """One GRPOJob's life from its creation on."""

    pods = PodDefaults(image="trainer:1", preflight=True)

    def __init__(
        self,
        spec: dict[str, Any],
        plan: ExecutionPlan,
        story: Story = (),
        *,
        ends: Iterable[Any] = (WELL,),
        reports: Iterable[Any] = ({},),
        faults: dict[int, str] | None = None,
        lags: dict[str, float] | None = None,
        on_commit: Act | None = None,
    ) -> None:
        """`ends` are those of the gangs that train, and `reports` those of preflights; the last
        comes again. `faults` are those of the operator's writes, by number. `lags` are seconds
        until the watch of a kind shows a write; without any it does before the answer comes.
        `on_commit` is called while the answer to the first commit is on its way."""
        self.plan, self.story = plan, list(story)
        self.ends, self.reports = list(ends), list(reports)
        self.faults, self.lags = faults or {}, lags or {}
        self.on_commit = on_commit
        self.writes: list[str] = []
        self.told: list[tuple[str, str, str]] = []
        self.news: list[tuple[str, str, str]] = []
        """Changes of the conditions as the API server has them, each of which is an event."""
        self.due: float | None = NOW
        self.failures = 0
        self.has_died = False
        self.failed = 0
        """Gangs that ended badly by themselves."""
        self.outage = ("", "", 0.0)
        """What of a request says that it fails, how, and until when."""
        self.timers: dict[str, float] = {}
        """When the pods of a Job end, by its uid."""
        self.started: set[str] = set()
        """Jobs whose pods were made, by uid."""
        self._events: list[tuple[float, Resource, Object, bool]] = []
        self._changes = 0
        super().__init__(spec)
        self._objects[RESOURCE_FLAVORS.path("", "default")] = {"metadata": {"name": "default"}}

    def make_queue(self) -> Any:
        return Admission(self)

    def publish(self, job: GRPOJobRecord, status: GRPOJobStatus, _: float) -> None:
        stored = GRPOJobStatus.model_validate(self.job["status"])
        change = telling_change(job.status.conditions, status.conditions)
        if change and not self.has_died:
            self.told.append((change.type, change.status, change.reason))
            assert self.told == self.news[: len(self.told)], "an event of no written status"
        assert status.attempt <= stored.attempt

    # The API server

    def store(self, resource: Resource, item: Object) -> Object:
        path = resource.path(item["metadata"]["namespace"], item["metadata"]["name"])
        before = self._objects.get(path)
        item = {**item, "metadata": {"generation": 1, **item["metadata"]}}
        stored = super().store(resource, item)
        self._changes += 1
        if self.on_commit and stored["status"].get("attempt"):
            act, self.on_commit = self.on_commit, None
            act(self)
        if resource is GRPOJOBS and before:
            old, new = (GRPOJobStatus.model_validate(i["status"]) for i in (before, stored))
            assert new.attempt >= old.attempt
            change = telling_change(old.conditions, new.conditions)
            if change:
                self.news.append((change.type, change.status, change.reason))
        return stored

    def _watch(self, resource: Resource, stored: Object, is_gone: bool = False) -> None:
        lag = self.lags.get(resource.plural, 0.0)
        self._events.append((self.now + lag, resource, stored, is_gone))
        self.deliver()

    def remove(self, resource: Resource, item: Object) -> None:
        """Delete an object."""
        metadata = item["metadata"]
        self._objects.pop(resource.path(metadata["namespace"], metadata["name"]))
        self._version += 1
        self._changes += 1
        last = {**item, "metadata": {**metadata, "resourceVersion": str(self._version)}}
        self._watch(resource, last, is_gone=True)

    def deliver(self) -> None:
        """Pass what the watches have to the caches, as informers and kopf do."""
        events = [event for event in self._events if event[0] <= self.now]
        self._events = [event for event in self._events if event[0] > self.now]
        for _, resource, item, is_gone in events:
            if self._take(resource, item, is_gone):
                self.call_for(0.0)
            elif resource is GRPOJOBS:
                self.call_for(ECHO_DELAY)

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        request = f"POST {resource.plural} {body['metadata']['name']}"
        created = super().create
        return await self._write(request, lambda: created(resource, namespace, body))

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object, subresource: str = ""
    ) -> Object:
        request = f"PATCH {resource.plural}/{subresource} {name}"
        patched = super().patch
        return await self._write(
            request, lambda: patched(resource, namespace, name, patch, subresource)
        )

    async def delete(self, resource: Resource, namespace: str, name: str, observed: Any) -> None:
        async def apply() -> None:
            item = self._objects.get(resource.path(namespace, name))
            if item is None:
                return
            if version_of(item) != (observed.uid, observed.version):
                raise Conflict("it has changed", 409)
            self.remove(resource, item)

        await self._write(f"DELETE {resource.plural} {name}", apply)

    async def delete_all(self, selection: Selection) -> None:
        async def apply() -> None:
            for pod in self.all_of(PODS):
                is_selected = reconcile_world.selects(selection.labels, pod["metadata"]["labels"])
                if is_selected and pod["status"]["phase"] not in ENDED:
                    self.end_pod(pod)

        await self._write("DELETE pods", apply)

    async def _write(self, request: str, apply: Callable[[], Awaitable[T]]) -> T:
        """Take a write of the operator, or fail as is asked for."""
        fault = self.faults.get(len(self.writes), "")
        refused, kind, until = self.outage
        if refused and refused in request and self.now < until:
            fault = kind
        self.writes.append(request)
        is_create = request.startswith("POST")
        conflict = (AlreadyExists if is_create else Conflict)(f"{request}: 409", 409)
        # what is gone is deleted
        if fault == "not found" and not request.startswith("DELETE"):
            raise NotFound(f"{request}: 404", 404)
        if fault == "conflict":
            raise conflict
        if fault == "denied":
            raise Denied(f"{request}: 422", 422)
        if fault == "unavailable":
            raise Unavailable(f"{request}: 500", 500)
        if fault == "death":
            raise Death
        had_quota = self.has_quota
        answer = await apply()
        has_pods = any(map(is_live, self.pods_of(COMPONENT_TRAINER)))
        assert self.has_quota or not (had_quota and has_pods), "quota goes back under live pods"
        if fault == "death after":
            raise Death
        if fault == "lost":
            raise Unavailable(f"{request}: no answer")
        if fault == "lost conflict" and not request.startswith("DELETE"):
            raise conflict
        return answer

    def all_of(self, resource: Resource) -> list[Object]:
        folder = resource.path(KEY.namespace)
        return [item for path, item in self._objects.items() if path.startswith(f"{folder}/")]

    @property
    def has_quota(self) -> bool:
        """True while Kueue counts quota for the job."""
        return any(
            "admission" in item.get("status", {}) and not kueue_writes.is_true(item, "Finished")
            for item in self.all_of(WORKLOADS)
        )

    # Time

    def call_for(self, seconds: float | None) -> None:
        """Have the job reconciled after so many seconds; an earlier time stays."""
        if seconds is not None:
            due = self.now + seconds
            self.due = due if self.due is None else min(self.due, due)

    async def live(self, rounds: int = 600) -> "World":
        """Let the job live until nothing is left to happen."""
        for _ in range(rounds):
            self.deliver()
            if self.due is not None and self.due <= self.now:
                await self._work()
            elif not self.control():
                times = [*self.timers.values(), *([] if self.due is None else [self.due])]
                times += [event[0] for event in self._events]
                later = [time for time in times if time > self.now]
                if not later:
                    return self
                self.now = min(later)
        raise AssertionError(f"no rest: {self.job['status'].get('phase')}, {self.writes[-8:]}")

    async def _work(self) -> None:
        """What grpo_kube/work_queue.py does with the key."""
        self.due = None
        try:
            self.call_for(await self.reconcile())
            self.failures = 0
        except ClusterError:
            self.failures += 1
            self.call_for(doubled_pause(FIRST_RETRY, LAST_RETRY, self.failures))
        except Death:
            self._events, self.caches, self.failures, self.has_died = [], Caches(), 0, True
            self._reconciler = self._make_reconciler()
            for resource in (GRPOJOBS, JOBS, PODS, SERVICES, WORKLOADS):
                for item in self.all_of(resource):
                    self._take(resource, item)
            self.call_for(0.0)

    def _take(self, resource: Resource, item: Object, is_gone: bool = False) -> bool:
        """Pass an object to its cache; True if it is news."""
        caches: list[Cache[Any]] = [
            self.caches.grpojobs, self.caches.jobs, self.caches.pods, self.caches.services,
            self.caches.workloads,
        ]  # fmt: skip
        cache = next((cache for cache in caches if cache.resource is resource), None)
        if cache is None:
            return False
        key = ObjectKey(item["metadata"]["namespace"], item["metadata"]["name"])
        before = cache.get(key)
        if is_gone:
            cache.discard(key, *version_of(item))
            return before is not None
        after = cache.put(item)
        return after is not None and not has_same_content(before, after)

    # Everybody else

    @property
    def moment(self) -> str:
        """Where the job is: `ending` from the end of a pod until the status says so, else its
        phase."""
        phase = str(self.job["status"].get("phase", ""))
        attempt = str(self.job["status"].get("attempt", 0))
        ended = [
            pod
            for pod in self.pods_of(COMPONENT_TRAINER)
            if pod["metadata"]["labels"][LABEL_ATTEMPT] == attempt
            and pod["status"]["phase"] in ENDED
        ]
        return "ending" if ended and phase == "Running" else phase

    def control(self) -> bool:
        """One step of controllers, trainers and users; True if it changed anything."""
        before = self._changes
        if self.story and self.story[0][0] == self.moment:
            _, act = self.story.pop(0)
            act(self)
            return True
        self._collect()
        for job in self.all_of(JOBS):
            self._sync(job)
        for uid in [uid for uid, time in self.timers.items() if time <= self.now]:
            del self.timers[uid]
            self._end_gang(uid)
        for item in self.all_of(WORKLOADS):
            self._manage(item)
        return self._changes != before

    def _collect(self) -> None:
        """The garbage collector, and the end of pods that were deleted."""
        uids = {item["metadata"]["uid"] for item in (*self.all_of(JOBS), *self.all_of(GRPOJOBS))}
        for resource in (JOBS, WORKLOADS, PODS):
            for item in self.all_of(resource):
                owners = item["metadata"].get("ownerReferences", [])
                is_orphan = owners and owners[0]["uid"] not in uids
                if is_orphan and resource is PODS:
                    self.end_pod(item)
                elif is_orphan:
                    self.remove(resource, item)
        for pod in self.all_of(PODS):
            if "deletionTimestamp" in pod["metadata"]:
                self.remove(PODS, pod)

    def _sync(self, job: Object) -> None:
        """The Job controller."""
        metadata, uid = job["metadata"], job["metadata"]["uid"]
        component = metadata["labels"][LABEL_COMPONENT]
        pods = [pod for pod in self.all_of(PODS) if owner(pod) == uid]
        live = [pod for pod in pods if is_live(pod)]
        if job.get("status", {}).get("conditions"):
            for pod in live:
                self.end_pod(pod)
            return
        again = live if component == COMPONENT_ENGINE else pods
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        missing = set(range(job["spec"].get("completions", 1))) - {index(pod) for pod in again}
        # It counts a pod that is gone as one that failed.
        has_lost = missing and uid in self.started
        is_over = component == COMPONENT_TRAINER and (failed or has_lost)
        if is_over or (component == COMPONENT_PREFLIGHT and len(failed) > 2):
            self._finish(job, "Failed")
        elif pods and not missing and not live:
            self._finish(job, "Complete")
        for number in missing if not is_over else ():
            self._make_pod(job, number)
        if component != COMPONENT_ENGINE and not pods:
            self.timers.setdefault(uid, self.now + STEP)
        self.started.add(uid)

    def _finish(self, job: Object, kind: str) -> None:
        condition = {"type": kind, "status": "True", "reason": "BackoffLimitExceeded"}
        self.store(JOBS, {**job, "status": {"conditions": [condition]}})

    def _make_pod(self, job: Object, number: int) -> None:
        labels, uid = job["metadata"]["labels"], job["metadata"]["uid"]
        name = f"{job['metadata']['name']}-{number}-{self._version}"
        pod = pod_object(
            number, int(labels.get(LABEL_ATTEMPT, 0)), name=name, uid=name, by=uid,
            component=labels[LABEL_COMPONENT], owner=labels.get(LABEL_UID, ""),
        )  # fmt: skip
        pod["metadata"]["labels"][LABEL_CONTROLLER] = uid
        if LABEL_UID not in labels:
            del pod["metadata"]["labels"][LABEL_UID]
        self.store(PODS, pod)

    def _end_gang(self, uid: str) -> None:
        """The pods of a Job end by themselves."""
        pods = [pod for pod in self.all_of(PODS) if owner(pod) == uid and is_live(pod)]
        for pod in pods:
            if pod["metadata"]["labels"][LABEL_COMPONENT] == COMPONENT_PREFLIGHT:
                report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
                self.set_state(pod, terminated(0, json.dumps(report)))
                return
        if pods:
            end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
            self.failed += end is BAD
            for pod in pods if end is WELL else pods[1:]:
                self.set_state(pod, end)

    def set_state(self, pod: Object, state: Object, **status: Any) -> None:
        """Give a pod's container a state."""
        ended = state.get("terminated")
        phase = "Running"
        if ended:
            phase = "Succeeded" if ended["exitCode"] == 0 else "Failed"
        containers = [{"name": "trainer", "state": state}]
        changed = {**pod["status"], "phase": phase, "containerStatuses": containers, **status}
        self.store(PODS, {**pod, "status": changed})

    def end_pod(self, pod: Object) -> None:
        """Delete a pod, which takes a moment."""
        if "deletionTimestamp" not in pod["metadata"]:
            deleted = {**pod["metadata"], "deletionTimestamp": at(0)}
            self.store(PODS, {**pod, "metadata": deleted})

    def _manage(self, stored: Object) -> None:
        """Kueue's manager."""
        item = json.loads(json.dumps(stored))
        follows = kueue_writes.what_follows(item)
        if kueue_writes.is_true(item, "Finished"):
            return
        if follows:
            follows(item)
        elif kueue_writes.waits(item):
            kueue_writes.reserve(item, "all", "default")
        if item != stored:
            self.store(WORKLOADS, item)

    def pods_of(self, component: str) -> list[Object]:
        labelled = self.all_of(PODS)
        return [pod for pod in labelled if pod["metadata"]["labels"][LABEL_COMPONENT] == component]

    def edit(self, **spec: Any) -> None:
        """A user changes the spec."""
        metadata = {**self.job["metadata"], "generation": self.job["metadata"]["generation"] + 1}
        self.store(GRPOJOBS, {**self.job, "metadata": metadata, "spec": self.job["spec"] | spec})


def owner(item: Object) -> str:
    """uid of an object's controller."""
    owners = item["metadata"].get("ownerReferences", [])
    return str(owners[0]["uid"]) if owners else ""


def index(pod: Object) -> int:
    return int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])


def is_live(pod: Object) -> bool:
    return pod["status"]["phase"] not in ENDED and "deletionTimestamp" not in pod["metadata"]
