"""What general tools read of a GRPOJob: a reason, and the conditions of kstatus and Kueue.

`status.reason` is kubectl's column REASON. `Finished` is Kueue's word for an end, good or bad.
`Reconciling` and `Stalled` are those of kstatus, by which Flux, Helm and others judge an object:
https://github.com/fluxcd/cli-utils/blob/main/pkg/kstatus/README.md. Its verdict is meant to be that
on a batch/v1 Job. It is InProgress until the gang runs, and Current while it runs, is suspended or
has succeeded. It is Failed once the job has failed.

All of them follow from the other conditions and the phase, and from nothing else.
"""

from collections.abc import Iterator, Sequence

from grpo_api.status.status import Condition, ConditionType, Phase
from grpo_planner.result.result import SPEC_ERRORS

from ..records.reasons import Reason

C = ConditionType

_STEPS = (
    (C.FAILED, "True"),
    (C.ADMITTED, "False"),
    (C.SCHEDULED, "False"),
    (C.DEGRADED, "True"),
    (C.HEALTHY, "False"),
)
"""Conditions in the order of a job's life, each with the status that is not well."""

_ENDED = (Phase.SUCCEEDED, Phase.FAILED)
_CURRENT = (Phase.RUNNING, Phase.SUSPENDED, *_ENDED)
"""Phases in which the operator brings nothing about any more, or only a user can."""
_STALLING = SPEC_ERRORS | {Reason.INVALID_SPEC, Reason.NOT_SUPPORTED, Reason.STORAGE_NOT_SHARED}
"""Reasons of a job that does not start, however long it waits, until its spec is changed."""
ABNORMAL = frozenset({C.RECONCILING, C.STALLED})
"""Conditions that are absent unless they are True, as kstatus recommends."""


def first_unwell(conditions: Sequence[Condition]) -> Condition | None:
    """The first condition, in the order of a job's life, that is not well; None if all are."""
    by_type = {condition.type: condition for condition in conditions}
    succeeded = by_type.get(C.SUCCEEDED)
    if succeeded and succeeded.status == "True":
        # Whatever an earlier attempt met is over.
        return None
    for kind, unwell in _STEPS:
        condition = by_type.get(kind)
        if condition and condition.status == unwell:
            return condition
    return None


def kstatus_conditions(
    phase: Phase, conditions: Sequence[Condition], like: Condition
) -> Iterator[Condition]:
    """The conditions that follow from the others; `like` has the generation and the time."""
    unwell = first_unwell(conditions)
    reason = unwell.reason if unwell else str(phase)
    message = unwell.message if unwell else f"the job is {phase}"
    is_stalled = phase is Phase.FAILED or (phase is Phase.PENDING and reason in _STALLING)

    def state(kind: ConditionType, *, is_true: bool, reason: str, message: str) -> Condition:
        update = {"type": kind, "status": str(is_true), "reason": reason, "message": message}
        return like.model_copy(update=update)

    if phase in _ENDED:
        ends = (condition.message for condition in conditions if condition.type == C.SUCCEEDED)
        end_message = unwell.message if unwell else next(ends, "")
        yield state(C.FINISHED, is_true=True, reason=str(phase), message=end_message)
    else:
        not_ended = "the job has not ended"
        yield state(C.FINISHED, is_true=False, reason=Reason.NOT_FINISHED, message=not_ended)
    if is_stalled:
        yield state(C.STALLED, is_true=True, reason=reason, message=message)
    elif phase not in _CURRENT:
        yield state(C.RECONCILING, is_true=True, reason=reason, message=message)
