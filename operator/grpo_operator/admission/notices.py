"""Tells jobs of their verdicts: a new status or reason at once, a new sentence when its turn comes.

When one job starts, the place of every job behind it changes. A write per job and change would cost the API server more
than the jobs themselves, and nobody reads two hundred sentences a second. So what a job reads is its last verdict, but
for sentences that wait for their turn.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from ..names import ObjectKey
from .judge import Verdict

NEWS_PAUSE = 0.5
"""Seconds between two jobs whose sentence is updated."""


class Tell(Protocol):
    """How jobs hear that there is something to read."""

    def __call__(self, keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        """Queue these jobs for a reconcile; `slow` puts them behind jobs that wait for a step."""
        ...


class Notices:
    """What each waiting job reads."""

    def __init__(self, tell: Tell) -> None:
        """Start without verdicts; the callback queues jobs for a reconcile."""
        self._tell = tell
        self._verdicts: Mapping[str, Verdict] = {}
        self._told: dict[str, Verdict] = {}
        self._news: dict[str, ObjectKey] = {}
        self._newsworthy = asyncio.Event()

    def read(self, uid: str) -> Verdict | None:
        """Return the verdict that the job's status shows, or is about to show; None without one."""
        return self._told.get(uid)

    def post(self, verdicts: Mapping[str, Verdict], keys: Mapping[str, ObjectKey], others: Collection[str]) -> None:
        """Store the verdicts of a pass and queue jobs with news.

        The uids in `others` keep their last verdict; all remaining ones lose theirs.
        """
        self._verdicts = verdicts
        self._told = {uid: published for uid, published in self._told.items() if uid in verdicts or uid in others}
        self._news = {uid: key for uid, key in self._news.items() if uid in verdicts}
        urgent = []
        for uid, verdict in verdicts.items():
            published = self._told.get(uid)
            # who is admitted now was not, or no longer, when it read its last verdict
            if published is None or published.news != verdict.news or verdict.admitted:
                self._told[uid] = verdict
                self._news.pop(uid, None)
                urgent.append(keys[uid])
            elif published != verdict:
                # Only the place in the queue has changed: it waits for its turn, and keeps the turn that it has.
                self._news.setdefault(uid, keys[uid])
        if self._news:
            self._newsworthy.set()
        self._tell(urgent)

    async def run(self) -> None:
        """Tells new sentences, one job after the other, until cancelled."""
        while True:
            await self._newsworthy.wait()
            self.tell_one()
            await asyncio.sleep(NEWS_PAUSE)

    def tell_one(self) -> None:
        """Tells the job that has waited longest for its new sentence."""
        # the dictionary keeps the order in which jobs came, so the first has waited longest
        if self._news:
            uid = next(iter(self._news))
            self._told[uid] = self._verdicts[uid]
            self._tell([self._news.pop(uid)], slow=True)
        if not self._news:
            self._newsworthy.clear()
