"""At each moment of a job's life its status is true, whatever its user changes, whatever becomes of
its gang, and whichever operator looks."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.findings.diagnosis import UNSEEN_MEANING
from grpo_api.report.report import Finding, Progress
from grpo_api.status.status import Condition, ConditionType, GRPOJobStatus
from grpo_kube.objects.times import Observed, timestamp
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, Pull, Silence
from grpo_operator.records.parsing import pod_record
from grpo_operator.records.records import PodRecord
from grpo_operator.report.events import telling_change
from grpo_operator.report.status import build_status, phase, to_json
from tests.generated import cases
from tests.unit import kueue_world, leader_world
from tests.unit.operator_world import LIMITS, NOW, PLAN, pod_object, said, terminated

LIVE = ("live", "pending", "bound", "lost")
STATES: dict[str, dict[str, Any]] = {
    "live": {"state": {"running": {}}},
    "pending": {"state": {}, "phase": "Pending", "node": ""},
    "bound": {"state": {"waiting": {"reason": "ImagePullBackOff"}}, "phase": "Pending"},
    "lost": {
        "state": {"running": {}},
        "conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotReady"}],
    },
    "well": {"state": terminated(0, said("Succeeded", step=9))},
    "bad": {"state": terminated(41, said("Error", message="no luck", attempt=1))},
    "killed": {"state": terminated(137, reason="OOMKilled")},
    "evicted": {
        "state": terminated(143),
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "Preemption"}],
    },
}
COLLAPSED = Finding(finding="EntropyCollapsed", since=30, confidence=0.9)


class _Death(Exception):
    """The operator's process ends between two writes."""


class Pod(leader_world.Pod):
    """A pod that may wait for a node or an image, and may end in several ways."""

    @property
    def is_live(self) -> bool:
        return self.state in LIVE and not self.deleting

    def record(self) -> PodRecord:
        name = f"pod-{self.number}"
        more = {"name": name, "uid": name, "by": self.owner or None, "deleted": self.deleting}
        return pod_record(pod_object(self.index, self.attempt, **(more | STATES[self.state])))


@dataclass
class Life(leader_world.QueuedWorld):
    """One job from its creation on; each status is held against the one before."""

    born: str = "live"
    """State of new pods."""
    progress: Progress | None = None
    heard: float = 0.0
    is_silent: bool = False
    images: dict[str, Any] = field(default_factory=dict)
    """The image that each Job was made with, by its uid."""
    writes_left: int | None = None
    """Writes until the operator dies; None: it lives."""

    def add(self, *pod: Any) -> None:
        self.made += 1
        states = () if len(pod) > 5 else (self.born,)
        self.pods.append(Pod(*pod, *states, number=self.made))

    def look(self) -> Observation:
        seen = super().look()
        attempt = seen.job.status.attempt
        rank0 = [pod for pod in self.pods if (pod.attempt, pod.index) == (attempt, 0)]
        is_there = any(pod.state == "live" for pod in rank0) and seen.job.is_active
        if self.progress and not (is_there and self.progress.attempt == attempt):
            self.progress = None
        heard = Observed(NOW + self.heard)
        pull = Pull(self.progress, heard, heard) if self.progress else None
        silence = Silence(heard, "refused") if self.is_silent and is_there else None
        return replace(seen, pull=pull, silence=silence)

    def reconcile(self) -> Decision:
        try:
            return super().reconcile()
        except _Death:
            self.tracker, self.progress, self.writes_left = FirstSeenTracker(), None, None
            return super().reconcile()

    def spend_write(self) -> None:
        """Count a write of the operator, which may not live to make it."""
        if self.writes_left == 0:
            raise _Death
        if self.writes_left is not None:
            self.writes_left -= 1

    def start(self, seen: Observation) -> tuple[Observation, Decision]:
        self.spend_write()
        before = {job.uid for job in self.jobs}
        answer = super().start(seen)
        self.images |= {
            job.uid: self.spec.get("image") for job in self.jobs if job.uid not in before
        }
        return answer

    def collect(self, seen: Observation) -> None:
        self.spend_write()
        super().collect(seen)

    def write(self, seen: Observation, decision: Decision) -> None:
        self.spend_write()
        new = build_status(seen, decision)
        check(seen, decision, new)
        self.status = to_json(new)
        again = self.look()
        repeated = decide(again, LIMITS)
        if repeated.action is decision.action:
            repetition = to_json(build_status(again, repeated))
            assert self.news(repetition) == self.news(self.status), "a write without news"

    def news(self, status: dict[str, Any]) -> dict[str, Any]:
        """What of a status is to be the same when nothing has changed."""
        return status

    @property
    def may_edit(self) -> bool:
        """What the API server's rule asks for a change of how the job runs."""
        has_failed = self.status.get("phase") == "Failed"
        return not self.status.get("attempt") or bool(self.spec.get("suspend")) or has_failed

    def edit(self, **spec: Any) -> None:
        self.spec = self.spec | spec
        self.meta["generation"] += 1


Act = Callable[[Life], None]


def _edit(**spec: Any) -> Act:
    def act(life: Life) -> None:
        if "image" not in spec or life.may_edit:
            life.edit(**spec)

    return act


def _pods(state: str, *, all_of_them: bool = False) -> Act:
    """Pods that live get that state; without `all_of_them` the first of them."""

    def act(life: Life) -> None:
        live = [pod for pod in life.pods if pod.is_live]
        for pod in live if all_of_them else live[:1]:
            pod.state = state

    return act


def _answer(answer: str) -> Act:
    def act(life: Life) -> None:
        life.answer = answer

    return act


def _born(state: str) -> Act:
    def act(life: Life) -> None:
        life.born = state

    return act


def _workload(status: dict[str, Any] | None) -> Act:
    def act(life: Life) -> None:
        life.workload = kueue_world.make_workload(status) if status is not None else None

    return act


def _queue(name: str) -> Act:
    def act(life: Life) -> None:
        life.meta["labels"] = {"kueue.x-k8s.io/queue-name": name} if name else {}

    return act


def _report(steps: int, *findings: Finding) -> Act:
    def act(life: Life) -> None:
        attempt = life.status.get("attempt", 0)
        is_new = life.progress is None or life.progress.attempt != attempt
        if not attempt:
            return
        step = steps if is_new or life.progress is None else life.progress.step + steps
        life.heard, life.is_silent = life.now, False
        life.progress = Progress(
            attempt=attempt, step=step, total_steps=1000, stage="Training", seconds_per_step=60.0,
            findings=list(findings), metrics={"kl": 0.5, "reward": 1.0},
        )  # fmt: skip

    return act


def _silent(life: Life) -> None:
    life.is_silent = True


def _delete_pods(life: Life) -> None:
    for pod in life.pods:
        pod.deleting = True


def _delete_jobs(life: Life) -> None:
    for job in life.jobs:
        job.deleting = True


def _restart(wall: float) -> Act:
    """Another operator leads, whose clock is fast by that."""

    def act(life: Life) -> None:
        life.tracker, life.wall, life.progress = FirstSeenTracker(), wall, None

    return act


def _die(writes: int) -> Act:
    """The next look ends after so many writes, and another operator goes on."""

    def act(life: Life) -> None:
        life.writes_left = writes

    return act


def _edit_unseen(life: Life) -> None:
    """A user suspends the job, changes its image and resumes it while no operator looks."""
    life.edit(suspend=True)
    life.edit(suspend=False, image=f"mine:{life.meta['generation']}")


def _wait(seconds: float) -> Act:
    def act(life: Life) -> None:
        life.now += seconds

    return act


ACTS: dict[str, Act] = {
    "suspend": _edit(suspend=True),
    "resume": _edit(suspend=False),
    "image a": _edit(image="mine:a"),
    "image b": _edit(image="mine:b"),
    "retry": lambda life: life.edit(retry=life.spec.get("retry", 0) + 1),
    "deadline": _edit(activeDeadlineSeconds=60),
    "no deadline": _edit(activeDeadlineSeconds=None),
    "no restarts": _edit(restarts={"limit": 0}),
    "samples": _edit(samples={"everySteps": 5}),
    "unreadable": _edit(training={"beta": "much"}),
    "readable": _edit(training={"beta": 0.0}),
    **{f"answer {name}": _answer(name) for name in ("admitted", "waits", "no plan", "refused")},
    **{f"pods are born {name}": _born(name) for name in ("live", "pending", "bound")},
    "all pods run": _pods("live", all_of_them=True),
    **{f"a pod is {name}": _pods(name) for name in ("well", "bad", "killed", "evicted", "lost")},
    "all pods are well": _pods("well", all_of_them=True),
    "pods are deleted": _delete_pods,
    "jobs are deleted": _delete_jobs,
    "queue": _queue("team"),
    "no queue": _queue(""),
    "workload admitted": _workload(kueue_world.admitted()),
    "workload evicted": _workload(kueue_world.evicted()),
    "workload gone": _workload(None),
    "report": _report(25),
    "report few": _report(2),
    "report finding": _report(25, COLLAPSED),
    "silent": _silent,
    "new leader": _restart(0.0),
    "fast leader": _restart(3000.0),
    "slow leader": _restart(-3000.0),
    **{f"death after {writes}": _die(writes) for writes in range(4)},
    "image unseen": _edit_unseen,
    "a minute": _wait(60.0),
    "a while": _wait(1500.0),
}

_NUMBER = re.compile(r"attempt (\d+)")


def check(seen: Observation, decision: Decision, new: GRPOJobStatus) -> None:
    """Hold a status against the one before, and against what is seen."""
    old = seen.job.status
    by_type = {condition.type: condition for condition in new.conditions}
    assert len(by_type) == len(new.conditions)
    true = {kind for kind, condition in by_type.items() if condition.status == "True"}
    _check_phase(new, true)
    _check_times(seen, old, new)
    _check_counters(seen, decision, old, new)
    _check_messages(seen, decision, old, new, by_type)
    _check_reports(seen, new, true)
    assert new.observed_generation == seen.job.generation
    change = telling_change(old.conditions, new.conditions)
    if change and change.type in {c.type for c in old.conditions}:
        before = old.condition(ConditionType(change.type))
        assert before
        assert (before.status, before.reason) != (change.status, change.reason)
    if change and old.is_true(ConditionType.ADMITTED) and "Admitted" not in true:
        assert change.type in ("Admitted", "Suspended", "Failed", "Succeeded"), "not why"


def _check_phase(new: GRPOJobStatus, true: set[str]) -> None:
    ends = true & {"Succeeded", "Failed"}
    assert len(ends) <= 1
    assert ("Finished" in true) == bool(ends)
    assert new.phase == phase(new.conditions)
    assert bool(new.completion_time) == bool(ends)
    if "Running" in true:
        assert {"Admitted", "Scheduled"} <= true
        assert not true & {"Suspended", "Finished", "Reconciling", "Stalled"}
    if "Suspended" in true:
        assert new.phase == "Suspended"
        assert not true & {"Admitted", "Scheduled", "Running", "Degraded"}
    is_active = "Admitted" in true and not ends
    assert bool(new.attempt_start_time) == is_active
    assert (new.phase in ("Starting", "Running", "Restarting")) == is_active


def _check_times(seen: Observation, old: GRPOJobStatus, new: GRPOJobStatus) -> None:
    now = timestamp(seen.now)
    for condition in new.conditions:
        before = old.condition(ConditionType(condition.type))
        assert condition.last_transition_time <= now
        if before is None or before.last_transition_time > now:
            continue
        assert condition.last_transition_time >= before.last_transition_time
        has_moved = condition.last_transition_time != before.last_transition_time
        assert not has_moved or condition.status != before.status
        assert condition.observed_generation >= before.observed_generation
    times = [new.start_time, new.attempt_start_time, new.completion_time, now]
    known = [time for time in times if time]
    assert known == sorted(known)


def _check_counters(
    seen: Observation, decision: Decision, old: GRPOJobStatus, new: GRPOJobStatus
) -> None:
    assert new.attempt >= old.attempt
    retries = decision.action is Action.RETRY
    if not retries:
        assert new.restarts >= old.restarts
        assert new.uncounted_restarts >= old.uncounted_restarts
        assert new.active_seconds >= old.active_seconds
    ended = [end.attempt for end in new.ends]
    assert ended == sorted(set(ended))
    assert bool(new.start_time) == bool(new.attempt)
    if seen.job.is_finished and not retries:
        assert (new.phase, new.reason, new.completion_time) == (
            old.phase, old.reason, old.completion_time
        ) or new.completion_time == timestamp(seen.now)  # fmt: skip

        def parts(status: GRPOJobStatus) -> list[tuple[str, ...]]:
            return sorted((c.type, c.status, c.reason, c.message) for c in status.conditions)

        assert parts(new) == parts(old)


def _check_messages(
    seen: Observation,
    decision: Decision,
    old: GRPOJobStatus,
    new: GRPOJobStatus,
    by_type: dict[str, Condition],
) -> None:
    is_active = bool(new.attempt_start_time)
    true = {kind for kind, condition in by_type.items() if condition.status == "True"}
    if is_active and old.attempt == new.attempt and old.is_true(ConditionType.RUNNING):
        assert by_type["Running"].message != f"attempt {new.attempt} starts"
    for kind, condition in by_type.items():
        numbers = [int(number) for number in _NUMBER.findall(condition.message)]
        assert all(number <= new.attempt for number in numbers), condition
        if is_active and kind in ("Admitted", "Scheduled", "Running") and numbers:
            assert numbers[0] == new.attempt, condition
        if condition.message == "the gang is whole":
            assert is_active, condition
            before = old.condition(ConditionType.DEGRADED)
            is_news = before is None or before.message != condition.message
            assert not (is_news and seen.first_seen.over), "a pod of it has ended"
        if condition.message.startswith(UNSEEN_MEANING):
            assert is_active, condition
        if condition.message == "suspended":
            assert "Suspended" in true, condition
        if condition.message == "no attempt runs":
            assert not is_active, condition
        if "the next attempt begins after a pause" in condition.message:
            assert decision.reason in ("RestartBackoff", "InvalidSpec"), condition
        if condition.reason == "Suspended":
            assert "Suspended" in true, condition


def _check_reports(seen: Observation, new: GRPOJobStatus, true: set[str]) -> None:
    is_active = bool(new.attempt_start_time)
    progress = new.progress
    if progress and progress.eta:
        assert is_active, "an ETA of no attempt"
        assert progress.attempt == new.attempt, "an ETA of an earlier attempt"
    if progress and progress.stage:
        assert is_active
    if not is_active:
        live = {pod.name for pod in seen.pods if pod.termination is None}
        shown = {pod.name for pod in new.pods if pod.phase in ("Pending", "Running")}
        assert shown <= live, "pods that are gone"
    healthy = new.condition(ConditionType.HEALTHY)
    if healthy and healthy.status == "False" and is_active and seen.pull:
        assert healthy.reason in [finding.finding for finding in new.findings or []]


NAMES = st.sampled_from([*ACTS])


def live(acts: list[tuple[str, ...]]) -> Life:
    """A life in which these acts fall between two looks each."""
    life = Life({}, {"generation": 1}, {}, PLAN, None)
    for names in acts:
        for name in names:
            ACTS[name](life)
        life.reconcile()
        life.control()
        life.now += 2.0
        life.reconcile()
        life.now += 1.0
        _check_image(life)
    return life


def _check_image(life: Life) -> None:
    """Hold the running attempt against the spec."""
    seen = life.look()
    if seen.child and seen.job.spec and seen.job.is_active and not seen.first_seen.over:
        assert life.images[seen.child.uid] == life.spec.get("image"), "an attempt of an old spec"


def _story(text: str) -> list[tuple[str, ...]]:
    return [tuple(names.split(", ")) for names in text.split("; ")]


@settings(max_examples=cases(40))
@given(st.lists(st.lists(NAMES, min_size=1, max_size=2).map(tuple), min_size=6, max_size=16))
@example(_story("a minute; report; jobs are deleted"))
@example(_story("a minute; report; suspend; a minute"))
@example(_story("a minute; no restarts; a pod is killed"))
@example(_story("a minute; suspend; resume"))
@example(_story("a minute; jobs are deleted; samples; a pod is bad; samples; samples"))
@example(_story("a minute; report finding; a pod is killed; report few"))
@example(_story("a minute; image unseen; a minute"))
@example(_story("a minute, death after 1; death after 2, a pod is killed; a minute"))
def test_each_status_of_a_life_is_true(acts: list[tuple[str, ...]]) -> None:
    live(acts)
