"""When, where and how often a gang that has ended may start again.

Pauses that grow, the user's rules, the limits, and nodes to keep away from. All of it follows from
status.ends, so that a new operator process goes on where the last one was.
"""

from collections.abc import Sequence
from dataclasses import replace

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
from grpo_kube.objects.times import doubled_pause
from grpo_planner.memory.disk import less_disk_message

from ..records.reasons import RELEASES, Reason
from ..records.records import GRPOJobRecord
from ..records.terminations import PodTermination
from .decisions import Action, Decision, Limits
from .observation import Observation


def rule_for(job: GRPOJobRecord, end: PodTermination) -> tuple[str, RestartRule] | None:
    """The first of spec.restarts.rules that an end matches, with its path."""
    rules = job.spec.restarts.rules if job.spec else []
    for index, rule in enumerate(rules):
        if _matches(rule, end):
            return f"spec.restarts.rules[{index}]", rule
    return None


def _matches(rule: RestartRule, end: PodTermination) -> bool:
    if rule.on_exit_codes:
        return rule.on_exit_codes.has_code(end.exit_code)
    if rule.on_results:
        return end.outcome.result.value in rule.on_results
    return not set(rule.on_reasons or ()).isdisjoint(end.reasons)


def restart_or_fail(
    observation: Observation, limits: Limits, outcome: Outcome, *, counted: bool, node: str = ""
) -> Decision:
    """The next attempt, after a pause if the last ones ended soon; FAIL at the limit."""
    job = observation.job
    status = job.status
    if counted:
        kind = "restarts"
        restarts = status.restarts
        limit = job.restart_limit
    else:
        kind = "uncounted restarts"
        restarts = status.uncounted_restarts
        limit = job.uncounted_limit
    if restarts >= limit:
        message = f"{outcome.result} after {restarts} of {limit} {kind}: {outcome.message}"
        return Decision(
            Action.FAIL, Reason.RESTART_LIMIT, message, ended=outcome, counted=counted, node=node
        )
    pause = restart_pause(observation, limits)
    seconds_left = pause - observation.over_for
    if seconds_left > 0:
        message = (
            f"attempt {status.attempt} ended with {outcome.result}: {outcome.message}; the next "
            f"attempt begins after a pause of {pause:g} s, for those before it ended soon, too"
        )
        return Decision(Action.WAIT, Reason.RESTART_BACKOFF, message, requeue_after=seconds_left)
    avoided = avoided_nodes(status, node, straggler_node(observation))
    return Decision(
        Action.ADMIT,
        outcome.result,
        outcome.message,
        ended=outcome,
        counted=counted,
        node=node,
        avoided_nodes=avoided,
    )


def fail_on_second_disk_shortage(
    observation: Observation, outcome: Outcome, decision: Decision
) -> Decision:
    """The decision on an end as OutOfDisk: the next attempt would write as much, so the second in a
    row fails the job and says how to write less."""
    job = observation.job
    if decision.action is not Action.ADMIT or job.spec is None:
        return decision
    has_failed_before = bool(job.status.ends) and job.status.ends[-1].reason == outcome.result
    if not has_failed_before:
        return decision
    message = f"out of disk twice in a row: {outcome.message}{less_disk_message(job.spec)}"
    return replace(decision, action=Action.FAIL, message=message)


def rollback_of(job: GRPOJobRecord, end: PodTermination) -> Rollback | None:
    """Return the rollback after an attempt that diverged; None if a rollback is impossible or not
    wanted.

    Data that the run has already left out can't have caused the divergence.
    """
    if job.spec is None or job.spec.guard.on_divergence == "Fail":
        return None
    outcome = end.outcome
    if not end.reported or outcome.result not in DIVERGED:
        return None
    diverged_on = outcome.diverged_on
    rollbacks = job.status.rollbacks
    if diverged_on is None or len(rollbacks) >= MAX_ROLLBACKS:
        return None
    if any(rollback.skipped == diverged_on for rollback in rollbacks):
        return None
    return Rollback(attempt=job.status.attempt, reason=outcome.result, skipped=diverged_on)


def restart_pause(observation: Observation, limits: Limits) -> float:
    """Seconds between the end of an attempt and the next; 0 after a gang that ran well."""
    if observation.running_seconds >= limits.healthy_run_seconds:
        return 0.0
    short_attempts = 0
    for end in reversed(observation.job.status.ends):
        is_release = end.reason in (*RELEASES, Reason.EVICTED)
        if is_release or end.running_seconds >= limits.healthy_run_seconds:
            break
        short_attempts += 1
    if not short_attempts:
        return 0.0
    return doubled_pause(
        limits.restart_pause_seconds, limits.longest_restart_pause_seconds, short_attempts
    )


def pausing(job: GRPOJobRecord, released_for: float, limits: Limits) -> float:
    """Seconds that a gang which was released that long ago still stays out of the queue; 0 when it
    is in."""
    releases = releases_in_a_row(job.status.ends)
    if not releases or not job.is_released:
        return 0.0
    longest = limits.longest_release_pause_seconds
    pause = doubled_pause(limits.release_pause_seconds, longest, releases)
    return max(0.0, pause - released_for)


def releases_in_a_row(ends: Sequence[AttemptEnd], reasons: frozenset[Reason] = RELEASES) -> int:
    """How many of the last ends in a row were releases for one of these reasons."""
    count = 0
    for end in reversed(ends):
        if end.reason not in reasons:
            break
        count += 1
    return count


def avoided_nodes(status: GRPOJobStatus, node: str, slow_node: str = "") -> tuple[str, ...]:
    """Return the nodes that the next attempt avoids, after the current one has ended on `node`
    without an outcome.

    A node on which two attempts in a row ended like this is likely to be broken. One that has been
    slow for long is likely to stay so.
    """
    avoided = list(status.avoided_nodes)
    last_node = status.ends[-1].node if status.ends else ""
    has_died_twice = node == last_node
    for suspect in (node if has_died_twice else "", slow_node):
        if suspect and suspect not in avoided:
            avoided.append(suspect)
    return tuple(avoided[-MAX_AVOIDED_NODES:])


LASTING_STEPS = 50
"""Steps after which a straggler is no passing guest on its node: five measured ones."""


def straggler_node(observation: Observation) -> str:
    """Node of a rank that has been slower than the others for long, as rank 0 found it; empty for
    none.

    A pod may say anything: it is believed of nodes that its own gang ran on.
    """
    status = observation.job.status
    progress = status.progress
    if progress is None or progress.attempt != status.attempt:
        return ""
    nodes = {pod.node for pod in status.pods} | {pod.node for pod in observation.pods}
    for finding in status.findings or ():
        is_lasting = progress.step - finding.since >= LASTING_STEPS
        if finding.finding == "Straggler" and is_lasting and finding.node in nodes:
            return finding.node or ""
    return ""
