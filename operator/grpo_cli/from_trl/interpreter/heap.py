"""Keeps all that a script can change, so that several ways through it start from the same state.

A condition that only the run decides is followed on each of its ways; what these leave different is
unknown below it. A loop's body is such a way, after all that it writes has become unknown.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Literal

from .values import MISSING, Known, Rest, Store, Unknown, Use

Way = Literal["return", "stop", "loop"] | None
"""How statements leave their body: by return, by raise, by break or continue, or at its end."""
_WAYS: list[Way] = [None, "loop", "return", "stop"]
Written = dict[tuple[int, object], tuple[Store, object, object]]
"""What was written, with its last value."""


class Heap:
    """The stores of one script."""

    def __init__(self) -> None:
        self.num_branches = 0
        """Conditions and loops that decide on the present statement."""
        self.is_rehearsal = False
        """The present statements are followed only for what they write."""
        self.statement: ast.AST = ast.Pass()
        self._journal: list[tuple[Store, object, object]] = []
        """What each write replaced."""
        self._first_return: int | None = None
        """Length of the journal at the first condition of this call that may have returned."""

    def write(self, store: Store, key: object, use: object, *, is_join: bool = False) -> None:
        """Write a name, an item, an entry or a field; MISSING deletes it."""
        self._journal.append((store, key, store.get(key, MISSING)))
        if not is_join:
            store.add_writer(key, self.statement)
        store.put(key, use)

    def branches(self, bodies: Sequence[Callable[[], Way]]) -> Way:
        """Follow bodies of which one runs, and join what they leave."""
        start = len(self._journal)
        ends: list[tuple[Way, Written]] = []
        self.num_branches += 1
        for body in bodies:
            way = body()
            ends.append((way, self._rollback(start)))
        self.num_branches -= 1
        ways = [way for way, _ in ends]
        if None in ways and "return" in ways and self._first_return is None:
            self._first_return = start
        lasting = [None] if None in ways else ["loop", "return"]
        self._join([written for way, written in ends if way in lasting])
        return min(ways, key=_WAYS.index)

    def repeat(self, body: Callable[[], Way]) -> None:
        """Follow a body that may run any number of times."""
        start, first_return, is_rehearsal = (
            len(self._journal),
            self._first_return,
            self.is_rehearsal,
        )
        self.is_rehearsal = True
        body()
        self._first_return, self.is_rehearsal = first_return, is_rehearsal
        why = f"the loop at line {getattr(self.statement, 'lineno', 0)} decides on it"
        for store, key, use in self._rollback(start).values():
            if key in store and isinstance(use, Use):
                self.write(store, key, Use(Unknown(use.node, why), use.node, use.frame))
        self.branches([body, lambda: None])

    def call(self, body: Callable[[], None]) -> None:
        """Follow the body of a function, of which a return may leave out the last part."""
        start, first_return = len(self._journal), self._first_return
        self._first_return = None
        body()
        if self._first_return is not None:
            self._join([self._rollback(max(self._first_return, start)), {}])
        self._first_return = first_return

    def _rollback(self, start: int) -> Written:
        """Undo what the journal has from an entry on, and return it."""
        written: Written = {}
        while len(self._journal) > start:
            store, key, former = self._journal.pop()
            written.setdefault((id(store), key), (store, key, store.get(key, MISSING)))
            store.put(key, former)
        return written

    def _join(self, ends: list[Written]) -> None:
        places = {place: where for end in ends for place, where in end.items()}
        for place, (store, key, _) in places.items():
            before = store.get(key, MISSING)
            values = [end[place][2] if place in end else before for end in ends]
            self.write(store, key, _joined(store, key, values), is_join=True)


def _joined(store: Store, key: object, values: Sequence[object]) -> object:
    """What a place of a store is where one of several values counts."""
    uses = [value for value in values if isinstance(value, Use)]
    if not uses:
        return MISSING
    is_same = all(_is_same(uses[0], use) for use in uses[1:])
    # Where the script reads a name that a way does not bind, that way was not taken.
    if is_same and (len(uses) == len(values) or store.kind == "names"):
        return uses[0]
    last = uses[-1]
    if store.kind == "items" and len(uses) < len(values):
        return Use(Rest(last.node), last.node, last.frame)
    why = "a condition decides on it"
    if store.kind == "names":
        lines = ", ".join(
            str(line) for line in sorted({line for line, _ in store.writers.get(key, ())})
        )
        why = f"{key} is assigned at lines {lines}, depending on conditions"
    return Use(Unknown(last.node, why), last.node, last.frame)


def _is_same(first: Use, second: Use) -> bool:
    if first.value is second.value:
        return True
    constants = [use.value for use in (first, second) if isinstance(use.value, Known)]
    return len({repr((made.value, made.assumptions)) for made in constants}) == 1 < len(constants)
