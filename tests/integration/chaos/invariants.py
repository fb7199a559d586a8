"""What must hold at each moment, whatever goes wrong: each a function that yields what was seen
against it. Pure."""

import time
from collections.abc import Callable, Iterator

from grpo_api.status.status import MAX_ROLLBACKS

from .history import History, Job, Version

DEFAULT_LIMIT = 3
DEFAULT_UNCOUNTED_LIMIT = 100
FINAL = ("Succeeded", "Failed")
FOREIGN_SECONDS = 15.0
"""A foreign pod that was bound so long before an admission is no news to the operator any more."""

Step = Callable[[Version, Version], Iterator[str]]
State = Callable[[Version], Iterator[str]]


def attempts_only_grow_one_by_one(before: Version, after: Version) -> Iterator[str]:
    """Each attempt is counted once, and no name is used twice."""
    if after.attempt < before.attempt or (after.attempt > before.attempt + 1 and not after.gap):
        yield f"status.attempt went from {before.attempt} to {after.attempt}"


def _retried(before: Version, after: Version) -> bool:
    """Whether the user let a failed job begin anew, which counts anew, too."""
    return bool(after.status.get("retry", 0) > before.status.get("retry", 0))


def restarts_only_grow_within_the_limit(before: Version, after: Version) -> Iterator[str]:
    """The write that counts a restart was made on the very spec that it stands beside, so the limit
    there binds it."""
    if _retried(before, after):
        return
    if after.restarts < before.restarts or (after.restarts > before.restarts + 1 and not after.gap):
        yield f"status.restarts went from {before.restarts} to {after.restarts}"
    limit = after.spec.get("restarts", {}).get("limit", DEFAULT_LIMIT)
    if after.restarts > before.restarts and after.restarts > limit and not after.gap:
        yield f"status.restarts grew to {after.restarts}; spec.restarts.limit is {limit}"


def uncounted_restarts_only_grow_within_their_limit(
    before: Version, after: Version
) -> Iterator[str]:
    """The same for those that don't count against the limit."""
    was, now = (one.status.get("uncountedRestarts", 0) for one in (before, after))
    limit = after.spec.get("restarts", {}).get("uncountedLimit", DEFAULT_UNCOUNTED_LIMIT)
    if _retried(before, after):
        return
    if now < was or (now > was and now > limit and not after.gap):
        yield (
            f"status.uncountedRestarts went from {was} to {now}; spec.restarts.uncountedLimit "
            f"is {limit}"
        )


def rollbacks_are_never_forgotten(before: Version, after: Version) -> Iterator[str]:
    """What a run leaves out it leaves out for ever, whatever the user retries; and it rolls back
    twice at most."""
    was, now = (one.status.get("rollbacks", []) for one in (before, after))
    if (
        now[: len(was)] != was
        or len(now) > MAX_ROLLBACKS
        or (len(now) > len(was) + 1 and not after.gap)
    ):
        yield f"status.rollbacks went from {was} to {now}"


def every_new_attempt_is_accounted_for(before: Version, after: Version) -> Iterator[str]:
    """A restart is counted or uncounted, but not both, and no more restarts are counted than there
    are attempts."""
    restarts = after.restarts + after.status.get("uncountedRestarts", 0)
    if restarts > before.restarts + before.status.get("uncountedRestarts", 0) + 1 and not after.gap:
        yield "one write counted several restarts"
    if restarts > max(0, after.attempt):
        yield f"{restarts} restarts of both kinds in {after.attempt} attempts"


def an_end_is_final(before: Version, after: Version) -> Iterator[str]:
    """What has succeeded or failed is never changed, but for a retry by the user."""
    if _retried(before, after) and not before.true("Succeeded"):
        return
    for kind in FINAL:
        if before.true(kind) and not after.true(kind):
            yield f"{kind} was True ({before.condition(kind)['reason']}) and is not any more"
    if before.finished and after.attempt != before.attempt:
        yield f"attempt {after.attempt} after the end"


def transition_times_move_with_the_status_alone(before: Version, after: Version) -> Iterator[str]:
    """metav1.Condition: lastTransitionTime is when `status` last changed."""
    for one in after.status.get("conditions", []):
        known = before.condition(one["type"])
        same_time = known.get("lastTransitionTime") == one["lastTransitionTime"]
        if known and known["status"] == one["status"] and not same_time and not after.gap:
            yield f"{one['type']} stayed {one['status']}, and its lastTransitionTime moved"


def nothing_is_started_without_a_plan(before: Version, after: Version) -> Iterator[str]:
    """The commit carries the plan."""
    if after.attempt > before.attempt and not after.status.get("plan"):
        yield f"attempt {after.attempt} has no plan"


STEPS: tuple[Step, ...] = (
    attempts_only_grow_one_by_one,
    restarts_only_grow_within_the_limit,
    rollbacks_are_never_forgotten,
    uncounted_restarts_only_grow_within_their_limit,
    every_new_attempt_is_accounted_for,
    an_end_is_final,
    transition_times_move_with_the_status_alone,
    nothing_is_started_without_a_plan,
)


def conditions_agree(now: Version) -> Iterator[str]:
    """Conditions are the truth, so they can't contradict each other."""
    true = {one["type"] for one in now.status.get("conditions", []) if one["status"] == "True"}
    for one, other in (
        ("Succeeded", "Failed"),
        ("Running", "Suspended"),
        ("Admitted", "Suspended"),
    ):
        if {one, other} <= true and not now.finished:
            yield f"{one} and {other} are both True"
    if {"Succeeded", "Failed"} <= true:
        yield "Succeeded and Failed are both True"
    if "Running" in true and "Admitted" not in true:
        yield "Running without Admitted"
    if "Running" in true and now.finished:
        yield "Running after the end"
    if now.finished and not now.status.get("completionTime"):
        yield "no completionTime after the end"
    kinds = [one["type"] for one in now.status.get("conditions", [])]
    if len(kinds) != len(set(kinds)):
        yield f"a condition stands twice: {kinds}"


def phase_is_one_word_for_the_conditions(now: Version) -> Iterator[str]:
    """For the words that a condition alone decides."""
    expected = next(
        (kind for kind in ("Succeeded", "Failed", "Suspended", "Running") if now.true(kind)), ""
    )
    decided = ("Succeeded", "Failed", "Suspended", "Running")
    if now.phase != "Draining" and (now.phase != expected if expected else now.phase in decided):
        yield f"phase {now.phase!r} with {expected or 'none of ' + ', '.join(decided)} True"


def nothing_is_observed_that_is_not_yet(now: Version) -> Iterator[str]:
    """A generation can't be answered before it is there."""
    seen = [now.status.get("observedGeneration", 0)]
    seen += [one.get("observedGeneration", 0) for one in now.status.get("conditions", [])]
    if max(seen) > now.generation:
        yield f"observedGeneration {max(seen)} of generation {now.generation}"


STATES: tuple[State, ...] = (
    conditions_agree,
    phase_is_one_word_for_the_conditions,
    nothing_is_observed_that_is_not_yet,
)


def gpus_are_never_promised_twice(history: History, job: Job) -> Iterator[str]:
    """When a gang is admitted, all admitted gangs of its product have room on the nodes of the
    time.

    A node counts if it could be used at some moment since the oldest of these gangs was admitted:
    what is lost afterwards was no mistake. Pods of nobody's gang count once they have been bound
    for a while.
    """
    now = job.last
    product, wanted = now.gpus
    if not wanted or not now.active:
        return
    gangs = [one for one in history.jobs.values() if one.gone_at is None and one.last.active]
    # one that is being deleted promises nothing any more; what its pods hold counts as anybody's
    gangs = [
        one
        for one in gangs
        if one.told_at is None and (one is job or not history.ended_unread(one))
    ]
    rivals = [one for one in gangs if one.last.gpus[0] == product]
    demand = sum(one.last.gpus[1] for one in rivals)
    since = min(_admitted_at(one) for one in rivals) - FOREIGN_SECONDS
    active = {one.uid for one in gangs}
    foreign = sum(
        pod.gpus
        for pod in history.pods.values()
        if pod.holds and pod.gpus and pod.job not in active and 0 < pod.bound_at < now.at - FOREIGN_SECONDS  # noqa: E501
        and history.best(pod.node, product, now.at, now.at)
    )  # fmt: skip
    capacity = history.capacity(product, since, now.at)
    if demand + foreign > capacity:
        held = ", ".join(f"{one.name} {one.last.gpus[1]}" for one in rivals)
        yield (
            f"{demand} × {product} are promised ({held}), {foreign} in foreign hands, of {capacity}"
        )


def _admitted_at(job: Job) -> float:
    """Since when the current attempt is admitted."""
    at = job.last.at
    for version in reversed(job.versions):
        if not version.active or version.attempt != job.last.attempt:
            break
        at = version.at
    return at


def judge(history: History, job: Job) -> Iterator[str]:
    """What is wrong with a job's newest version."""
    now = job.last
    for state in STATES:
        yield from _named(job, state.__name__, state(now))
    if len(job.versions) > 1:
        before = job.versions[-2]
        for step in STEPS:
            yield from _named(job, step.__name__, step(before, now))
        if now.attempt > before.attempt:
            yield from _named(
                job,
                gpus_are_never_promised_twice.__name__,
                gpus_are_never_promised_twice(history, job),
            )


def _named(job: Job, name: str, sentences: Iterator[str]) -> Iterator[str]:
    return (
        f"{name.replace('_', ' ')}: {job.name} ({job.uid[:8]}) at {_clock(job.last.at)}: {one}"
        for one in sentences
    )


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
