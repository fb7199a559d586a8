"""The head of a run on an object store: one small object that says who may commit, and what is committed.

It is both fence and pointer. It is written only under the condition that it is still what was read, so of two attempts
that live at once the older can't move it any more: what that one has uploaded belongs to nobody. A write that is
refused, or whose answer is lost, may have been carried out; the nonce that is read then tells.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError

from grpo_api.report.report import Outcome
from grpo_api.text.base import Model

from ..errors import BadInput, Preempted, StoreFailed

if TYPE_CHECKING:
    from .client import Store

HEAD = "head.json"
TRIES = 100
"""Refused writes after which a store is taken for one that refuses everything."""

Change = Callable[["Head"], "Head"]


class Committed(Model):
    """A checkpoint that counts."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that made it, and below whose folder it is."""
    step: Annotated[int, Field(ge=1)]
    """Finished optimizer steps."""
    manifest: str
    """sha256 of its manifest."""
    time: Annotated[float, Field(ge=0)] = 0.0
    """When it was committed, in unix seconds of that attempt's rank 0."""


class Head(Model):
    """The state of a run on an object store: its newest attempt and what counts."""

    uid: str
    """uid of the GRPOJob."""
    attempt: Annotated[int, Field(ge=1)]
    """The newest attempt that claimed the run; it alone moves the head."""
    nonce: str = ""
    """Another one in every write, by which a writer knows its own."""
    checkpoints: list[Committed] = []
    """Those that count, in the order in which they were committed."""
    export: Annotated[int, Field(ge=1)] | None = None
    """The attempt below whose folder the finished model is."""
    outcome: Outcome | None = None
    """How the attempt ended that finished the run."""


def read(store: "Store") -> Head | None:
    """The head of the run; None before the first claim.

    Raises:
        BadInput: the object is not a head.
        StoreFailed: as Store.get.
    """
    found = store.get(HEAD)
    return _parsed(store, found[0]) if found else None


def claim(store: "Store", uid: str, attempt: int) -> Head:
    """Take the run for this attempt; older ones can't commit from now on.

    Raises:
        BadInput: another job's.
        Preempted: a newer attempt has it.
        StoreFailed: as Store.get.
    """

    def taken(head: Head) -> Head:
        _require_newest(store, head, uid, attempt)
        return head.model_copy(update={"attempt": attempt})

    return _move(store, taken, Head(uid=uid, attempt=attempt))


def change(store: "Store", uid: str, attempt: int, changed: Change) -> Head:
    """Move the head, if this attempt still has the run; what stands then.

    Raises:
        Preempted: a newer attempt has it.
        StoreFailed: as Store.get; or the head is gone.
    """

    def own(head: Head) -> Head:
        _require_newest(store, head, uid, attempt)
        return changed(head)

    return _move(store, own, None)


def with_checkpoint(head: Head, made: Committed, keep: int) -> Head:
    """The head with one more checkpoint, and only the `keep` that were committed last: the step says less, for a run
    goes back behind a checkpoint that is damaged."""
    others = [one for one in head.checkpoints if (one.attempt, one.step) != (made.attempt, made.step)]
    return head.model_copy(update={"checkpoints": [*others, made][-keep:]})


def without_checkpoints(head: Head, dropped: Sequence[Committed]) -> Head:
    """The head without these checkpoints."""
    return head.model_copy(update={"checkpoints": [one for one in head.checkpoints if one not in dropped]})


def _require_newest(store: "Store", head: Head, uid: str, attempt: int) -> None:
    if head.uid != uid:
        raise BadInput(f"{store.url} belongs to the job with uid {head.uid}, this one is {uid}; name another folder")
    if head.attempt > attempt:
        raise Preempted(f"attempt {attempt} is superseded by attempt {head.attempt}, which has {store.url}")


def _move(store: "Store", changed: Change, first: Head | None) -> Head:
    """Write the changed head until a write of ours succeeds. `first`: the head to write if there is none."""
    written: set[str] = set()
    for _ in range(TRIES):
        found = store.get(HEAD)
        head = _parsed(store, found[0]) if found else None
        if head and head.nonce in written:
            return head
        if head is None and first is None:
            raise StoreFailed(f"{store.url}/{HEAD} is gone; somebody deleted it while the run was going on")
        new = (changed(head) if head else first).model_copy(update={"nonce": uuid.uuid4().hex})  # type: ignore[union-attr]
        written.add(new.nonce)
        if store.put_if(HEAD, new.model_dump_json().encode(), found[1] if found else None):
            return new
    raise StoreFailed(f"{store.url}/{HEAD}: {TRIES} writes were refused, although nobody else made one")


def _parsed(store: "Store", data: bytes) -> Head:
    try:
        return Head.model_validate_json(data)
    except ValidationError as error:
        raise BadInput(f"{store.url}/{HEAD} is not a run's head: {error.errors()[0]['msg']}") from error
