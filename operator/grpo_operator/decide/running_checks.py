"""Checks a running gang by what its rank 0 answers: a hang, a hub that does not answer, silence."""

from grpo_api.report.report import Outcome, Result

from ..records.reasons import Reason
from .decisions import Action, Decision, Limits, RequeueAfter
from .observation import Observation
from .restarts import restart_or_fail
from .start_checks import engines_gone


def hangs(observation: Observation, limits: Limits) -> Decision | RequeueAfter | None:
    """Restart a gang whose rank 0 answers but makes no progress: the second line behind the
    trainer's own watchdog.

    A pull that fails is no evidence of a hang, so only a rank 0 that answers is judged. How long it
    makes no progress is measured from when its reports arrived, since its own clock may be off.
    """
    pull = observation.pull
    allowed = observation.job.hang_allowance(pull.progress.stage) if pull else None
    if pull is None or allowed is None or observation.silence:
        return None
    age = pull.at - pull.advanced_at
    if age < allowed:
        seconds_since = observation.at - pull.advanced_at
        seconds_left = allowed - seconds_since
        return RequeueAfter(seconds_left) if seconds_left > 0 else None
    progress = pull.progress
    message = (
        f"no progress for {age:.0f} s in stage {progress.stage} after step {progress.step}; the "
        f"operator allows {allowed:.0f} s"
    )
    outcome = Outcome(result=Result.HANG, step=progress.step, message=message)
    return restart_or_fail(observation, limits, outcome, counted=True)


def hub_unreachable(observation: Observation, limits: Limits) -> Decision | None:
    """Release a gang that can't begin since the hub does not answer: others can use its GPUs, and
    the job tries again after a pause.

    It counts as no failure. Only an answering rank 0 is believed, as for a hang.
    """
    pull = observation.pull
    if pull is None or observation.silence or pull.progress.stage != "WaitingForHub":
        return None
    waited = pull.progress.stage_seconds
    wait = pull.progress.waiting
    if waited < limits.hub_silence_seconds:
        return None
    why = f": {wait.why}" if wait else ""
    message = f"no answer of the hub for {waited:.0f} s{why}"
    return Decision(Action.RELEASE, Reason.WAITING_FOR_HUB, message)


def silent(observation: Observation, limits: Limits) -> Decision | RequeueAfter | None:
    """Report rank 0's silence as Degraded and leave the gang alone: it may still train. Engines
    that are gone are made again meanwhile."""
    if observation.silence is None:
        return None
    silence = observation.at - observation.silence.since
    patience = limits.rank0_silence_seconds
    since = "for minutes"
    if not observation.has_answered:
        # It imports its libraries: on a cold disk that takes minutes.
        patience = float(observation.job.start_timeout)
        since = f"within {patience:.0f} s (spec.restarts.startTimeoutSeconds)"
    if silence < patience:
        return RequeueAfter(patience - silence)
    why = lost_node_message(observation) or (
        f"{observation.silence.problem}. Read its log (`grpo logs {observation.job.name}`), and "
        "check that NetworkPolicies let the operator reach the pod"
    )
    message = f"rank 0 has not answered {since}, so its progress is unknown: {why}"
    creation = engines_gone(observation, limits)
    action = creation.action if creation else Action.WAIT
    return Decision(action, Reason.PROGRESS_UNKNOWN, message)


def lost_node_message(observation: Observation) -> str:
    """The first training pod whose node has fallen silent; empty if none has."""
    return next(filter(None, (pod.lost_node_message for pod in observation.pods)), "")


def keep_running(observation: Observation, limits: Limits) -> Decision:  # noqa: ARG001
    """Wait: the attempt is running, and only its progress is published."""
    return Decision(Action.WAIT)
