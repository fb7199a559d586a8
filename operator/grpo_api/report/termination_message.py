"""Makes an Outcome fit into a termination message, of which the kubelet keeps TERMINATION_BYTES and
cuts the rest.

A cut one would be no JSON, and the whole end unknown. So what matters least is left out first, and
what says how the attempt ended, and where, always stays.
"""

from bisect import bisect_left
from collections.abc import Iterator

from ..text.contract import TERMINATION_BYTES
from ..text.messages import hide_secrets
from .report import MESSAGE_CHARACTERS, Outcome, Standstill
from .revisions import DATASET_FINGERPRINT

MESSAGE_BYTES = 1024
"""Room that a message gets at least, at the cost of other fields."""
FIRST_REVISIONS = ("model", "dataset", DATASET_FINGERPRINT)
"""Revisions that are left out last: what a run is made of before what it is scored by."""
_ELLIPSIS = " […] "


def truncate_to_fit(outcome: Outcome, message: str) -> Outcome:
    """The outcome with a message of any length and content, cut in the middle until it and the JSON
    are short enough.

    The bytes are counted of the JSON itself: a quote takes two there, a control character six, a
    character of another script up to four.
    """
    # A lone surrogate has no UTF-8, so it becomes a question mark.
    text = hide_secrets(message).encode(errors="replace").decode()
    whole = outcome.model_copy(update={"message": text})
    if _fits_termination_message(whole):
        return whole
    bare = outcome.model_copy(update={"message": ""})
    room = min(MESSAGE_BYTES, _size(whole) - _size(bare))
    bare = next(less for less in _ever_less(bare) if _size(less) <= TERMINATION_BYTES - room)

    def cut(length: int) -> Outcome:
        return bare.model_copy(
            update={"message": text[:length] + _ELLIPSIS + text[len(text) - length :]}
        )

    whole = bare.model_copy(update={"message": text})
    if _fits_termination_message(whole):
        return whole
    return cut(
        bisect_left(
            range(1, len(text) // 2 + 1),
            True,
            key=lambda length: not _fits_termination_message(cut(length)),
        )
    )


def with_standstill(outcome: Outcome, standstill: Standstill) -> Outcome:
    """The outcome with as many frames as leave half of the room for its message, which is cut to
    the rest."""
    frames = [frame.encode(errors="replace").decode() for frame in standstill.frames]
    bare = outcome.model_copy(update={"message": ""})

    def with_frames(count: int) -> Outcome:
        return bare.model_copy(
            update={"standstill": standstill.model_copy(update={"frames": frames[:count]})}
        )

    most = bisect_left(
        range(1, len(frames) + 1),
        True,
        key=lambda count: _size(with_frames(count)) > TERMINATION_BYTES // 2,
    )
    return truncate_to_fit(with_frames(most), outcome.message)


def _ever_less(outcome: Outcome) -> Iterator[Outcome]:
    """The outcome, and then with less and less of it: the least important first, and what must stay
    alone at last."""
    yield outcome
    first = [key for key in FIRST_REVISIONS if key in outcome.revisions]
    ordered = first + [key for key in outcome.revisions if key not in first]
    for field, keys in (("revisions", ordered), ("metrics", list(outcome.metrics))):
        entries = getattr(outcome, field)
        for count in reversed(range(len(keys))):
            outcome = outcome.model_copy(
                update={field: {key: entries[key] for key in keys[:count]}}
            )
            yield outcome
    for field in ("account", "standstill", "checkpoint", "export"):
        outcome = outcome.model_copy(update={field: None})
        yield outcome


def _fits_termination_message(outcome: Outcome) -> bool:
    return len(outcome.message) <= MESSAGE_CHARACTERS and _size(outcome) <= TERMINATION_BYTES


def _size(outcome: Outcome) -> int:
    return len(outcome.model_dump_json().encode())
