"""A pure world in which a GPU job's attempts run, are lost and begin again, and which keeps the
truth of their GPUs.

It plays the trainer, kubelets whose clocks are off, the Job controller, and an operator that looks
at all of it through the real parsers, policies and status, is away at times and remembers nothing
over that. Seconds since a start.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_api.report.report import Outcome, Progress, Result
from grpo_api.status.usage import GPUSeconds, Usage
from grpo_api.text.timing import Beginning
from grpo_kube.objects.times import Observed
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision, Limits
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, Pull, observe
from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_JOB, LABEL_UID
from grpo_operator.records.parsing import job_record, pod_record
from grpo_operator.records.records import GRPOJobRecord, JobRecord, PodRecord
from grpo_operator.report.status import build_status, to_json
from tests.unit.operator_world import GPU_PLAN, KEY, NOW, UID, at, make_job
from tests.unit.usage_run import NEVER, Gang, Pod, Run, truth

SPEC = {
    "placement": {"accelerator": "GPU", "nodes": GPU_PLAN.nodes},
    "restarts": {"limit": 1000, "uncountedLimit": 10000},
}
LOSSES = ("killed", "preempted", "node lost", "failed", "suspended", "unbound", "deleted")


@dataclass
class World:
    """The job, its gangs and an operator."""

    chance: random.Random
    losses: int
    now: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    gangs: list[Gang] = field(default_factory=list)
    first_seen_tracker: FirstSeenTracker = field(default_factory=FirstSeenTracker)
    queued: float = 0.0
    suspended: tuple[float, float] = (NEVER, NEVER)
    """From when till when the user has suspended the job."""
    admitted_from: float = 0.0
    away: float = 0.0
    """Seconds without an operator."""
    unseen: float = 0.0
    """GPU-seconds that pods held while no operator was there, and that no object told of when it
    came back: the pods had ended and were gone."""
    up_since: float = 0.0
    restarts: int = 0
    """How often the operator was away."""
    unstarted: set[int] = field(default_factory=set)
    """Attempts that were committed, but whose Job was never created: the operator was away until
    their time was up."""
    sets_clock: bool = False
    """True if the operator's clock is set by minutes while it runs; it is right at its start."""
    clock_off: float = 0.0
    parsed: tuple[dict[str, Any], dict[str, Any], GRPOJobRecord] | None = None
    """Spec and status that were parsed last, and what they gave."""

    def live(self) -> Iterator[Usage]:
        """Runs the job to its end and until its pods have ended; gives what every look tells."""
        end = NEVER
        while self.now < end + 120.0:
            if self.chance.random() < 0.02:
                self.restarts += 1
                self.clock_off = 0.0
                before, self.first_seen_tracker = self.now, FirstSeenTracker()
                self._pass(self.chance.uniform(5.0, 400.0))
                self.up_since, self.away = self.now, self.away + self.now - before
                self.unseen += self._unseen_since(before)
            elif self.sets_clock and self.chance.random() < 0.02:
                self.clock_off = self.chance.uniform(-600.0, 600.0)
            yield self._look()
            if end == NEVER and any(
                one["type"] == "Succeeded" and one["status"] == "True" for one in self._conditions
            ):
                end = self.now
            self._pass(self._until_look())

    @property
    def _conditions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status.get("conditions", [])
        return found

    def _unseen_since(self, time: float) -> float:
        """GPU-seconds since then of the pods that nobody can find any more."""
        pods = [
            pod
            for gang in self.gangs
            for pod in gang.pods
            if time < pod.ended <= self.now and not self._visible(gang, pod)
        ]
        seconds = sum(pod.ended - max(time, pod.bound) for pod in pods if pod.bound < pod.ended)
        # The moment of such an end is not known either: it may be taken for that of the return.
        seconds += sum(self.now - pod.ended for pod in pods)
        return seconds * GPU_PLAN.gpus / GPU_PLAN.nodes

    def _until_look(self) -> float:
        """An operator hears of every change at once; without one it looks when it has heard of rank
        0 or waited."""
        pods = [pod for gang in self.gangs[-2:] for pod in gang.pods]
        changes = [
            time
            for pod in pods
            for time in (pod.bound, pod.started, pod.deleted, pod.ended, pod.gone)
        ]
        changes += [gang.job_ended for gang in self.gangs[-2:]] + [*self.suspended]
        soon = min((time for time in changes if time > self.now), default=NEVER) - self.now + 0.3
        return min(soon, self.chance.uniform(5.0, 20.0))

    def _pass(self, spent: float) -> None:
        """Time passes; the part of it in which the job was to run and held nothing is waited."""
        first, self.now = self.now, self.now + spent
        done = min((gang.until for gang in self.gangs if gang.loss == "succeeded"), default=NEVER)
        busy = [(pod.bound, pod.ended) for gang in self.gangs for pod in gang.pods]
        busy += [self.suspended, (done, NEVER)]
        self.queued += spent - _covered(busy, first, self.now)

    def _look(self) -> Usage:
        job = self._job()
        children = [self._child(gang) for gang in self.gangs if self.now < gang.job_gone]
        pods = [
            self._pod(pod) for gang in self.gangs for pod in gang.pods if self._visible(gang, pod)
        ]
        now, moment = NOW + self.now + self.clock_off, Observed(self.now)
        seen = observe(
            job, children, pods, now=now, at=moment, first_seen_tracker=self.first_seen_tracker
        )
        seen = replace(
            seen,
            deleted_pods=tuple(
                self._pod(pod) for gang in self.gangs for pod in gang.pods if self._left(pod)
            ),
        )
        if job.is_active:
            seen = replace(seen, pull=self._pull(job.status.attempt))
        decision = decide(seen, Limits())
        if decision.action is Action.ADMIT:
            decision = self._answer(decision)
        self.status = to_json(build_status(seen, decision))
        self._act(seen, decision)
        found = self.status.get("usage")
        return Usage.model_validate(found or {"asOf": at(self.now)})

    def _job(self) -> GRPOJobRecord:
        """The job as the API server has it now; parsing it is half of the work, and it is the same
        until the next."""
        spec = {**SPEC, "suspend": self.suspended[0] <= self.now < self.suspended[1]}
        if self.parsed is None or self.parsed[0] != spec or self.parsed[1] is not self.status:
            self.parsed = spec, self.status, make_job(spec, self.status)
        return self.parsed[2]

    def _visible(self, gang: Gang, pod: Pod) -> bool:
        """A pod that has ended goes with its Job."""
        return self.now < min(pod.gone, max(pod.ended, gang.job_gone) + 1.0)

    def _left(self, pod: Pod) -> bool:
        """Whether this operator saw a pod end that has been deleted since."""
        return self.up_since <= max(pod.started, pod.ended) <= pod.gone <= self.now

    def _answer(self, decision: Decision) -> Decision:
        """What the queue says: that others are first, for a while, then that the attempt may
        start."""
        if self.now < self.admitted_from:
            return replace(decision, action=Action.QUEUE, reason="WaitingForGPUs", plan=GPU_PLAN)
        return replace(decision, action=Action.COMMIT, reason="Admitted", plan=GPU_PLAN)

    def _act(self, observation: Observation, decision: Decision) -> None:
        if decision.action is Action.START:
            self._start(self.status["attempt"])
        if decision.action is Action.SUSPEND and self.suspended[1] == NEVER:
            self.suspended = (self.suspended[0], self.now + self.chance.uniform(60.0, 600.0))
        if decision.action in (Action.COMMIT, Action.SUSPEND, Action.RELEASE):
            self.admitted_from = self.now + self.chance.choice((0.0, 0.0, 90.0))
        if decision.action is Action.RELEASE and self.status["attempt"] not in {
            gang.attempt for gang in self.gangs
        }:
            self.unstarted.add(self.status["attempt"])
        left = clean_up(replace(observation, job=self._job()), Limits())
        for gang in self.gangs:
            if f"{KEY.name}-{gang.attempt}" in left.delete_jobs and gang.job_gone == NEVER:
                gang.job_gone = self.now
                self._stop(gang)
            if gang.attempt in left.stop_attempts:
                self._stop(gang)

    def _stop(self, gang: Gang) -> None:
        """Somebody deletes the pods that live: SIGTERM, then a last word."""
        for pod in gang.pods:
            if pod.ended <= self.now:
                continue
            pod.deleted = min(pod.deleted, self.now)
            if pod.ended == NEVER:
                self._end(gang, pod, self.now + self.chance.uniform(0.2, 8.0), Result.PREEMPTED)

    def _end(self, gang: Gang, pod: Pod, when: float, result: Result | None) -> None:
        pod.ended = when
        if result and pod.started < when and gang.run and gang.run.begin <= when:
            said = Outcome(
                result=result, rank=pod.index, attempt=gang.attempt, account=gang.run.account(when)
            )
            pod.code, pod.message = (0 if result is Result.SUCCEEDED else 1), said.model_dump_json()
        if pod.deleted < NEVER:
            pod.gone = when + self.chance.uniform(0.0, 1.0)

    def _start(self, attempt: int) -> None:
        """Creates the gang, and with it its fate."""
        # each loss once at first, so that a short life meets them all
        loss = LOSSES[attempt - 1] if attempt <= len(LOSSES) else self.chance.choice(LOSSES)
        if attempt > self.losses:
            loss = "succeeded"
        gang = Gang(attempt, loss, [])
        bound = self.now + self.chance.uniform(0.2, 30.0)
        for index in range(GPU_PLAN.nodes):
            clock_off = self.chance.uniform(-600.0, 600.0)
            pod = Pod(attempt, index, clock_off, bound + self.chance.uniform(0.0, 1.0))
            if loss != "unbound":
                pod.started = pod.bound + self.chance.uniform(1.0, 40.0)
            gang.pods.append(pod)
        self.gangs.append(gang)
        if loss == "unbound":
            gang.pods[1].bound = NEVER
            return
        gang.run = Run(self.chance, self._newest(bound), gang.pods[0].started)
        self._fate(gang, max(pod.started for pod in gang.pods) + self.chance.uniform(1.0, 2400.0))

    def _newest(self, when: float) -> Beginning:
        sealed = [
            (one, clock)
            for one in self.gangs
            if one.run
            for t, clock in one.run.seals
            if t <= min(when, one.until)
        ]
        return (
            Beginning(attempt=sealed[-1][0].attempt, clock=sealed[-1][1]) if sealed else Beginning()
        )

    def _fate(self, gang: Gang, when: float) -> None:
        """What ends the gang then, all of it by itself."""
        first, *others = self.chance.sample(gang.pods, len(gang.pods))
        if gang.loss == "suspended":
            self.suspended = (when, NEVER)
            return
        if gang.loss == "succeeded":
            for pod in gang.pods:
                self._end(gang, pod, when + self.chance.uniform(0.0, 3.0), Result.SUCCEEDED)
        elif gang.loss in ("killed", "failed"):
            self._end(gang, first, when, Result.ERROR if gang.loss == "failed" else None)
            for pod in others:
                pod.deleted = when + 2.0
                self._end(gang, pod, when + self.chance.uniform(2.0, 12.0), Result.PREEMPTED)
        elif gang.loss == "node lost":
            first.deleted = first.gone = first.ended = when
            for pod in others:
                pod.deleted = when + 1.0
                self._end(gang, pod, when + self.chance.uniform(1.0, 12.0), Result.PREEMPTED)
        else:
            for pod in gang.pods:
                pod.deleted = when
                self._end(gang, pod, when + self.chance.uniform(1.0, 25.0), Result.PREEMPTED)
        gang.job_ended = max(pod.ended for pod in gang.pods) + 1.0
        if gang.loss == "deleted":
            gang.job_gone = when

    def _child(self, gang: Gang) -> JobRecord:
        """The gang's Job as the API server has it now."""
        name = f"{KEY.name}-{gang.attempt}"
        ended = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        conditions = (
            [ended | {"lastTransitionTime": at(gang.job_ended)}]
            if gang.job_ended <= self.now
            else []
        )
        meta = {
            **_meta(name, f"job-{gang.attempt}", UID),
            "labels": {LABEL_JOB: KEY.name, LABEL_UID: UID, LABEL_ATTEMPT: str(gang.attempt)},
        }
        return job_record({"metadata": meta, "spec": {}, "status": {"conditions": conditions}})

    def _pod(self, pod: Pod) -> PodRecord:
        """The pod as the API server has it now, with the times that its kubelet wrote."""
        labels = {
            LABEL_JOB: KEY.name,
            LABEL_UID: UID,
            LABEL_ATTEMPT: str(pod.attempt),
            LABEL_INDEX: str(pod.index),
        }
        meta: dict[str, Any] = {**_meta(pod.name, pod.name, f"job-{pod.attempt}"), "labels": labels}
        if pod.deleted <= self.now:
            meta["deletionTimestamp"] = at(pod.deleted)
        bound = pod.bound <= self.now
        status: dict[str, Any] = {"phase": "Pending", "podIP": "10.0.0.7"}
        if bound:
            scheduled = {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": at(pod.bound),
            }
            status |= {"conditions": [scheduled], "startTime": at(pod.bound + pod.clock_off)}
        if pod.started <= self.now:
            status |= {
                "phase": "Running",
                "containerStatuses": [{"name": "trainer", "state": {"running": {}}}],
            }
        if max(pod.started, pod.ended) <= self.now:
            end = {
                "exitCode": pod.code,
                "reason": "Error" if pod.code else "Completed",
                "message": pod.message,
            }
            end |= {
                "startedAt": at(pod.started + pod.clock_off),
                "finishedAt": at(pod.ended + pod.clock_off),
            }
            status["containerStatuses"] = [{"name": "trainer", "state": {"terminated": end}}]
            status["phase"] = "Failed" if pod.code else "Succeeded"
        return pod_record(
            {"metadata": meta, "spec": {"nodeName": "node-a" if bound else ""}, "status": status}
        )

    def _pull(self, attempt: int) -> Pull | None:
        """What rank 0 said a few seconds ago."""
        gang = next((one for one in self.gangs if one.attempt == attempt), None)
        when = self.now - self.chance.uniform(0.0, 5.0)
        if gang is None or gang.run is None or not gang.run.begin <= when < gang.until:
            return None
        progress = Progress(attempt=attempt, stage="Training", account=gang.run.account(when))
        return Pull(progress, Observed(when), Observed(when))

    def truth(self) -> GPUSeconds:
        """What the GPUs really did."""
        total = GPUSeconds()
        for gang in self.gangs:
            total = total.plus(truth(gang))
        return total


def _meta(name: str, uid: str, owner: str) -> dict[str, Any]:
    controller = [{"controller": True, "uid": owner}]
    return {
        **{"namespace": KEY.namespace, "name": name, "uid": uid},
        **{"resourceVersion": "11", "ownerReferences": controller},
    }


def _covered(spans: list[tuple[float, float]], first: float, last: float) -> float:
    """Seconds between two moments that lie in any of the spans."""
    covered, reached = 0.0, first
    for begin, end in sorted(spans):
        covered += max(0.0, min(end, last) - max(begin, reached))
        reached = max(reached, min(end, last))
    return covered
