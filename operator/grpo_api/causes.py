"""Which of several results is the cause and which the symptom.

When one rank of a gang dies its peers lose their connections, and the survivors are told to end: the first to report is
often only a symptom. A pod's supervisor ranks the ends of its processes and the operator those of its pods, both by
this one order.
"""

from enum import IntEnum

from .report import Result

PERMANENT = frozenset({Result.BAD_INPUT, Result.WEIGHTS_DIFFER, Result.DIVERGED, Result.DIVERGED_KL})
"""Results that the same input would give again: no restart."""


class Tier(IntEnum):
    """How likely an end is the cause of its peers' ends; the lowest is blamed."""

    PERMANENT = 1
    SPECIFIC = 2
    DISRUPTION = 3
    HANG = 4
    ERROR = 5
    RENDEZVOUS = 6
    TERMINATED = 7


_TIERS = {
    Result.OUT_OF_MEMORY: Tier.SPECIFIC,
    Result.REWARD_ERROR: Tier.SPECIFIC,
    Result.HANG: Tier.HANG,
    Result.RENDEZVOUS_TIMEOUT: Tier.RENDEZVOUS,
    Result.PREEMPTED: Tier.TERMINATED,
}


def tier(result: Result, *, reported: bool = True, disrupted: bool = False) -> Tier:
    """Where a failure stands in the search for the cause.

    Args:
        result: of the failure; for Succeeded the answer means nothing.
        reported: an Outcome says so; false where it was concluded from how the process ended.
        disrupted: the cluster ended the pod (eviction, preemption, node loss), not the program.
    """
    if reported and result in PERMANENT:
        return Tier.PERMANENT
    found = _TIERS.get(result, Tier.ERROR)
    return Tier.DISRUPTION if disrupted and found is not Tier.SPECIFIC else found
