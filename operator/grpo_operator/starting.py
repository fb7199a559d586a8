"""Checks of an attempt that was admitted and doesn't get going: no pods, no nodes, containers that don't start.

Half a gang is no gang, and one that doesn't run must not keep its GPUs: each check has a deadline, after which the gang
is released whole. Attempts that Kueue admits wait for their nodes as long as Kueue lets them.
"""

from grpo_api.status import ConditionType

from .decisions import Action, Decision, Due, Limits
from .observe import Observation
from .reasons import Reason
from .records import ENDED_PHASES, GRPOJobRecord
from .restarting import releases_in_a_row
from .times import seconds


def asks_about(seen: Observation, limits: Limits) -> str:
    """uid of the Job or pod whose events may say why the attempt doesn't get going; empty while it is too early."""
    if seen.child is None or seen.sighting.child is None or seen.started or seen.child.suspended:
        return ""
    waited = seen.at - seen.sighting.child
    if len(seen.pods) < seen.job.nodes:
        return seen.child.uid if waited >= limits.pods else ""
    if not seen.bound or waited < limits.words:
        return ""
    return next((pod.uid for pod in seen.pods if pod.phase == "Pending"), "")


def pods_missing(seen: Observation, limits: Limits) -> Decision | Due | None:
    """A Job whose pods the API server refuses holds its place for nothing.

    Only a refusal in words counts: in a burst the Job controller may just be busy.
    """
    if seen.child is None or seen.child.suspended or len(seen.pods) >= seen.job.nodes or _ran(seen):
        return None
    # what its predecessor still takes of a quota is free in a moment
    if seen.words and not any(pod.phase not in ENDED_PHASES for pod in seen.earlier_pods):
        message = f"{len(seen.pods)} of {seen.job.nodes} pods were created: {seen.words}"
        return Decision(Action.RELEASE, Reason.PODS_NOT_CREATED, message)
    return Due(_until_asked(seen, limits.pods))


def _until_asked(seen: Observation, first: float) -> float:
    """Seconds until events may tell more: first after that time, then every time that it has doubled."""
    waited = seen.at - (seen.sighting.child or seen.at)
    return first - waited if waited < first else waited


def never_bound(seen: Observation, limits: Limits) -> Decision | Due | None:
    """A gang that can't be bound whole in time gives everything back."""
    if seen.bound or _ran(seen) or seen.job.queue_name:
        return None
    spec, timeout = seen.job.spec, limits.scheduling
    if spec and seen.job.creates_pods:
        timeout = float(spec.placement.provisioning_timeout_seconds)
    left = timeout - admitted_for(seen.job, seen.now)
    if left > 0:
        return Due(left)
    waiting = next((pod.unschedulable for pod in seen.pods if pod.unschedulable), "no node took them in time")
    bound = sum(bool(pod.node) for pod in seen.pods)
    message = f"{bound} of {seen.job.nodes} pods were bound within {timeout:.0f} s: {waiting}"
    return Decision(Action.RELEASE, Reason.SCHEDULING_TIMEOUT, message)


def not_started(seen: Observation, limits: Limits) -> Decision | None:
    """An attempt that was committed and has no Job yet, for as long as nodes would be waited for.

    What is promised to it is nobody else's meanwhile, and no longer (cluster/gangs.py counts so, too): whatever kept it
    from being started, it doesn't start after that. The next attempt's Job has another name.
    """
    if seen.child is not None:
        return None
    told = seen.job.condition(ConditionType.SCHEDULED)
    # one that waits for the API server's leave keeps nothing from others
    if admitted_for(seen.job, seen.now) < limits.scheduling or (told and told.reason == Reason.FAILED_CREATE):
        return Decision(Action.START)
    why = told.message if told and told.reason == Reason.NAME_TAKEN else "its Job could not be created"
    return Decision(Action.RELEASE, Reason.SCHEDULING_TIMEOUT, f"not started in {limits.scheduling:.0f} s: {why}")


def never_started(seen: Observation, limits: Limits) -> Decision | Due | None:
    """A gang that has its nodes but doesn't run says why after a while, and gives them back in the end."""
    if not seen.bound or seen.started or _ran(seen):
        return None
    timeout = seen.job.start_timeout
    waited = seen.since(ConditionType.SCHEDULED) if seen.job.is_true(ConditionType.SCHEDULED) else 0.0
    why = _kubelets_words(seen)
    if waited < timeout:
        look_again = min(timeout - waited, _until_asked(seen, limits.words))
        return Decision(Action.WAIT, Reason.POD_WAITING, why, look_again=look_again) if why else Due(look_again)
    message = f"not all of {seen.job.nodes} pods ran within {timeout:.0f} s (spec.restarts.startTimeoutSeconds)"
    message += f": {why}" if why else ""
    before = releases_in_a_row(seen.job.status.ends, frozenset({Reason.START_TIMEOUT}))
    if before >= seen.job.restart_limit:
        return Decision(Action.FAIL, Reason.START_TIMEOUT, f"{message}; for the {before + 1}. time in a row")
    return Decision(Action.RELEASE, Reason.START_TIMEOUT, message)


def _kubelets_words(seen: Observation) -> str:
    """Which pod doesn't start and why, by its container's state or, for what only events tell, by an event."""
    stuck = next((pod for pod in seen.pods if _stuck(pod.waiting)), None)
    if stuck:
        return f"pod {stuck.name} waits: {stuck.waiting}"
    silent = next((pod for pod in seen.pods if pod.phase == "Pending"), None)
    if silent is None or not seen.words:
        return ""
    return f"pod {silent.name} waits on node {silent.node}: {seen.words}"


def _stuck(waiting: str) -> bool:
    """A container that waits for more than its image's first pull and its sandbox."""
    return bool(waiting) and not waiting.startswith(("ContainerCreating", "PodInitializing"))


def admitted_for(job: GRPOJobRecord, now: float) -> float:
    """Seconds since the attempt was admitted; 0 while Kueue has not."""
    begun = seconds(job.status.attempt_start_time)
    return 0.0 if begun is None else now - begun


def _ran(seen: Observation) -> bool:
    """Whether the whole gang has run: what is missing then has ended."""
    return seen.job.is_true(ConditionType.RUNNING)
