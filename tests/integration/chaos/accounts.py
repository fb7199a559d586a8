"""Held against the ledger when all is over: is what each job's status says what really happened?
Pure."""

from collections.abc import Callable, Iterator

from grpo_api.report.report import Result
from grpo_api.report.root_cause import DIVERGED, PERMANENT
from grpo_api.status.status import MAX_ROLLBACKS
from grpo_operator.records.reasons import Reason

from .history import History, Job
from .invariants import DEFAULT_LIMIT, DEFAULT_UNCOUNTED_LIMIT
from .ledger import Deed, Ledger

CLOCK_SECONDS = 2.0
"""What timestamps without fractions and two clocks of one machine may differ by."""

FAILURES = frozenset(Result) - {Result.SUCCEEDED, Result.PREEMPTED}

Account = Callable[[Job, Ledger], Iterator[str]]


def success_is_rank_0s(job: Job, ledger: Ledger) -> Iterator[str]:
    """Succeeded only if the trainer let rank 0 succeed, or all ranks, in the attempt that
    counts."""
    now = job.last
    if not now.true("Succeeded"):
        return
    ranks = {one.rank for one in ledger.of(job.uid, now.attempt) if one.result is Result.SUCCEEDED}
    if 0 not in ranks and len(ranks) < (now.status.get("plan") or {}).get("nodes", 1):
        yield (
            f"Succeeded in attempt {now.attempt}, of which ranks {sorted(ranks) or 'none'} said so"
        )


def failures_have_causes(job: Job, ledger: Ledger) -> Iterator[str]:
    """Failed only for what was done to the job."""
    now = job.last
    if not now.true("Failed"):
        return
    reason, message = now.condition("Failed")["reason"], now.condition("Failed")["message"]
    deeds = list(ledger.of(job.uid, now.attempt))
    if reason == "DeadlineExceeded":
        yield from _deadline(job)
    elif reason == "RestartLimit":
        yield from _limits(job, ledger)
    elif reason in PERMANENT | {Result.OUT_OF_MEMORY}:
        if not any(one.result == reason for one in deeds):
            yield f"{reason} in attempt {now.attempt}: nobody reported that: {message}"
    else:
        yield f"Failed for {reason}, which nothing here brings about: {message}"


def rollbacks_follow_divergences(job: Job, ledger: Ledger) -> Iterator[str]:
    """Each is of an attempt in which the trainer diverged; who asks for them fails of a divergence
    only after all."""
    now = job.last
    found = now.status.get("rollbacks", [])
    for one in found:
        if not any(deed.result == one["reason"] for deed in ledger.of(job.uid, one["attempt"])):
            yield (
                f"a rollback for {one['reason']} in attempt {one['attempt']}: nobody reported that"
            )
    wanted = now.spec.get("guard", {}).get("onDivergence") == "Rollback"
    if (
        wanted
        and now.true("Failed")
        and now.condition("Failed")["reason"] in DIVERGED
        and len(found) < MAX_ROLLBACKS
    ):
        yield f"failed of a divergence after {len(found)} rollbacks"


def _deadline(job: Job) -> Iterator[str]:
    now = job.last
    limit = now.spec.get("activeDeadlineSeconds")
    begun = next((one.at for one in job.versions if one.attempt), now.at)
    ended = now.at
    if limit is None or ended - begun < limit - CLOCK_SECONDS:
        yield (
            f"DeadlineExceeded {ended - begun:.1f} s after the first attempt; the limit is "
            f"{limit} s"
        )


def _limits(job: Job, ledger: Ledger) -> Iterator[str]:
    restarts, now = job.last.spec.get("restarts", {}), job.last
    uncounted = now.status.get("uncountedRestarts", 0)
    if uncounted >= restarts.get("uncountedLimit", DEFAULT_UNCOUNTED_LIMIT):
        return
    limit, counted = restarts.get("limit", DEFAULT_LIMIT), len(_counting(job, ledger))
    if now.restarts < limit or counted < now.restarts + 1:
        yield (
            f"RestartLimit with {now.restarts} of {limit} restarts; {counted} attempts had an "
            "end that counts"
        )


def _counting(job: Job, ledger: Ledger) -> set[int]:
    """The attempts in which something ended that counts."""
    return {
        one.attempt for one in ledger.of(job.uid) if one.counts and one.attempt <= job.last.attempt
    }


def no_restart_is_counted_without_a_failure(job: Job, ledger: Ledger) -> Iterator[str]:
    """status.restarts counts attempts that a failure of the training ended."""
    counted = _counting(job, ledger)
    if job.last.restarts > len(counted):
        yield f"{job.last.restarts} restarts were counted; attempts that failed: {sorted(counted)}"


def no_failure_goes_uncounted(job: Job, ledger: Ledger) -> Iterator[str]:
    """An attempt to which nothing was done but that its training failed, and after which another
    came."""
    if job.last.status.get("retry", 0):  # it counts anew since then
        return
    certain = surely_failed(job, ledger)
    if job.last.restarts < len(certain):
        yield (
            f"{job.last.restarts} restarts were counted; attempts that surely failed: "
            f"{sorted(certain)}"
        )


def each_end_names_what_was_done(job: Job, ledger: Ledger) -> Iterator[str]:
    """An attempt's end in status.ends has a reason that somebody gave; one that counts was a
    failure.

    Preempted and releases need none: the scheduler preempts by itself, and quotas forbid pods.
    """
    for version in job.versions:
        for one in version.status.get("ends", [])[-1:]:
            deeds = [deed for deed in ledger.of(job.uid, one["attempt"]) if deed.deed is Deed.ENDED]
            given = {deed.result for deed in deeds}
            told = (
                f"attempt {one['attempt']} ended with {one['reason']}; what was done to it: "
                f"{sorted(map(str, given))}"
            )
            # an end without words is whatever its exit code says
            if one["reason"] in FAILURES and not {one["reason"], None} & given:
                yield told
            if one.get("counted") and not any(deed.counts for deed in deeds):
                yield f"{told}, and it counts"


def surely_failed(job: Job, ledger: Ledger) -> set[int]:
    """Attempts before the last to which nothing else was done."""
    return {
        attempt
        for attempt in range(1, job.last.attempt)
        if (deeds := list(ledger.of(job.uid, attempt)))
        and all(one.counts and one.sure for one in deeds)
        and str(attempt) not in job.lost
        and not _pods_told_to_end_first(job, attempt)
    }


def _pods_told_to_end_first(job: Job, attempt: int) -> bool:
    """Whether the operator itself took the attempt back while its end was not known yet."""
    reasons = {
        one.condition("Admitted").get("reason") for one in job.versions if one.attempt == attempt
    }
    return bool(reasons & {"SchedulingTimeout", "Suspended"})


ACCOUNTS: tuple[Account, ...] = (
    success_is_rank_0s,
    failures_have_causes,
    rollbacks_follow_divergences,
    no_restart_is_counted_without_a_failure,
    no_failure_goes_uncounted,
    each_end_names_what_was_done,
)


def audit(history: History, ledger: Ledger) -> Iterator[str]:
    """What is wrong with the stories of all jobs that there have been."""
    for job in history.jobs.values():
        if (
            any(one.deed is Deed.SPOILED for one in ledger.of(job.uid))
            and job.last.phase == "Draining"
        ):
            continue
        for account in ACCOUNTS:
            for found in dict.fromkeys(account(job, ledger)):
                yield f"{account.__name__.replace('_', ' ')}: {job.name} ({job.uid[:8]}): {found}"


def events_tell_what_was(history: History, events: list[dict[str, object]]) -> Iterator[str]:
    """Each event on a GRPOJob tells of a condition as it was written."""
    said = {
        (job.uid, one["reason"])
        for job in history.jobs.values()
        for version in job.versions
        for one in version.status.get("conditions", [])
    }
    for event in events:
        about = event["involvedObject"]
        assert isinstance(about, dict)
        job = history.jobs.get(about["uid"])
        gaps = job is None or job.vanished or any(version.gap for version in job.versions)
        is_of_condition = event["reason"] != Reason.FAILED_DELETE
        if is_of_condition and not gaps and (about["uid"], event["reason"]) not in said:
            yield (
                f"event {event['reason']} on {about['name']}: no condition ever said so: "
                f"{event['message']}"
            )
