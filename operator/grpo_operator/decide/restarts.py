"""When, where and how often a gang that has ended may start again.

Pauses that grow, the user's rules, the limits, and nodes to keep away from. All of it follows from
status.ends, so that a new operator process goes on where the last one was.
"""

from collections.abc import Sequence
from itertools import takewhile

from grpo_api.report.report import Outcome
from grpo_api.report.root_cause import DIVERGED
from grpo_api.spec.run_policy import RestartRule
from grpo_api.status.status import (
    MAX_AVOIDED_NODES,
    MAX_ROLLBACKS,
    AttemptEnd,
    GRPOJobStatus,
    Rollback,
)
from grpo_kube.objects.times import seconds

from ..records.reasons import RELEASES, Reason
from ..records.records import GRPOJobRecord
from ..records.terminations import PodTermination
from .decisions import Action, Decision, Limits
from .observation import Observation


def rule_for(job: GRPOJobRecord, end: PodTermination) -> tuple[str, RestartRule] | None:
    """The first of spec.restarts.rules that an end matches, with its path."""
    rules = job.spec.restarts.rules if job.spec else []
    return next(
        (
            (f"spec.restarts.rules[{at}]", rule)
            for at, rule in enumerate(rules)
            if _matches(rule, end)
        ),
        None,
    )


def _matches(rule: RestartRule, end: PodTermination) -> bool:
    if rule.on_exit_codes:
        return rule.on_exit_codes.has_code(end.exit_code)
    if rule.on_results:
        return end.outcome.result.value in rule.on_results
    return not set(rule.on_reasons or ()).isdisjoint(end.reasons)


def restart_or_fail(
    observation: Observation, limits: Limits, outcome: Outcome, *, counted: bool, node: str = ""
) -> Decision:
    """The next attempt, after a pause if the last ones ended soon too; the end when a limit is
    reached."""
    status, job = observation.job.status, observation.job
    done, limit = (
        (status.restarts, job.restart_limit)
        if counted
        else (status.uncounted_restarts, job.uncounted_limit)
    )
    if done >= limit:
        kind = "restarts" if counted else "uncounted restarts"
        message = f"{outcome.result} after {done} of {limit} {kind}: {outcome.message}"
        return Decision(
            Action.FAIL, Reason.RESTART_LIMIT, message, ended=outcome, counted=counted, node=node
        )
    left = restart_pause(observation, limits) - observation.over_for
    if left > 0:
        message = f"attempt {status.attempt} ended with {outcome.result}: {outcome.message}"
        return Decision(Action.WAIT, Reason.RESTART_BACKOFF, message, look_again=left)
    avoided = avoided_nodes(status, node)
    return Decision(
        Action.ADMIT,
        outcome.result,
        outcome.message,
        ended=outcome,
        counted=counted,
        node=node,
        avoided_nodes=avoided,
    )


def rollback_of(job: GRPOJobRecord, end: PodTermination) -> Rollback | None:
    """Return the rollback after an end by which the job diverged; None if it can't or shall not
    roll back.

    What the run has left out already can't be what it diverged on: somebody says so who doesn't
    know.
    """
    spec, outcome, before = job.spec, end.outcome, job.status.rollbacks
    if (
        spec is None
        or spec.guard.on_divergence == "Fail"
        or not end.reported
        or outcome.result not in DIVERGED
    ):
        return None
    if outcome.diverged_on is None or len(before) >= MAX_ROLLBACKS:
        return None
    if outcome.diverged_on in [rollback.skipped for rollback in before]:
        return None
    return Rollback(attempt=job.status.attempt, reason=outcome.result, skipped=outcome.diverged_on)


def restart_pause(observation: Observation, limits: Limits) -> float:
    """Seconds between the end of the current attempt and the next: none after a gang that ran well
    for a while."""
    if observation.running_seconds >= limits.healthy:
        return 0.0

    def soon(end: AttemptEnd) -> bool:
        return (
            end.reason not in (*RELEASES, Reason.EVICTED) and end.running_seconds < limits.healthy
        )

    before = sum(1 for _ in takewhile(soon, reversed(observation.job.status.ends)))
    return (
        min(limits.longest_restart_pause, limits.restart_pause * 2.0 ** (before - 1))
        if before
        else 0.0
    )


def pausing(job: GRPOJobRecord, now: float, limits: Limits) -> float:
    """Seconds that a released gang still stays out of the queue; 0 when it is in."""
    releases = releases_in_a_row(job.status.ends)
    if not releases or not job.is_released:
        return 0.0
    pause = min(limits.longest_release_pause, limits.release_pause * 2.0 ** (releases - 1))
    released_at = seconds(job.status.ends[-1].end_time) or now
    return max(0.0, released_at + pause - now)


def releases_in_a_row(ends: Sequence[AttemptEnd], reasons: frozenset[Reason] = RELEASES) -> int:
    """How many of the last ends, without another between them, were releases for one of these
    reasons."""
    count = 0
    for end in reversed(ends):
        if end.reason not in reasons:
            break
        count += 1
    return count


def avoided_nodes(status: GRPOJobStatus, node: str) -> tuple[str, ...]:
    """The nodes to keep the next attempt away from, once the current one has ended on that node
    without a word.

    A node on which two attempts in a row died so is likely to be broken.
    """
    known, last = tuple(status.avoided_nodes), status.ends[-1] if status.ends else None
    if last is None or not node or node != last.node or node in known:
        return known
    return (*known, node)[-MAX_AVOIDED_NODES:]
