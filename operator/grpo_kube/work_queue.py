"""A work queue of keys: de-duplicated, one worker per key at a time, delayed adds, retries with
growing pauses.

Any number of events about one job cost one reconcile.
"""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable

from .objects.errors import Conflict, OperatorError
from .objects.resources import ObjectKey
from .objects.times import doubled_pause

log = logging.getLogger(__name__)

Reconcile = Callable[[ObjectKey], Awaitable[float | None]]
FIRST_RETRY, LAST_RETRY = 0.1, 60.0
ECHO_DELAY = 1.0
"""Seconds until a key is reconciled that hardly has to be, unless something happens before."""
BATCH_DELAY = 0.1
"""Seconds in which events that need no prompt reconcile gather, such as those of a gang's pods."""


class WorkQueue:
    """Keys to reconcile, in two lanes: work that users wait for goes before reports of progress."""

    def __init__(self) -> None:
        """Starts empty; its time is that of the event loop that it is made in."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.PriorityQueue[tuple[bool, int, ObjectKey]] = asyncio.PriorityQueue()
        self._waiting: dict[ObjectKey, float] = {}
        self._slow: dict[ObjectKey, bool] = {}
        self._count = itertools.count()
        self._active: dict[ObjectKey, float] = {}
        """Keys that are worked on, each with the time since when."""
        self._timers: dict[ObjectKey, asyncio.TimerHandle] = {}
        self._failures: dict[ObjectKey, int] = {}
        self.adds = 0
        """Keys that were put in since the start; one that waits already is not put in again."""
        self.retries = 0
        """Keys that were put in again after a failure."""

    def __len__(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    def add(self, key: ObjectKey, slow: bool = False) -> None:
        """Queue the key, behind all others if `slow`; one that waits moves at most forward."""
        first = key not in self._waiting
        if not first and (slow or not self._slow[key]):
            return
        self._slow[key] = slow
        if first:
            self._waiting[key] = self._loop.time()
            self.adds += 1
        if key not in self._active:
            self._ready.put_nowait((slow, next(self._count), key))

    def add_all(self, keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        """Queue all of these keys."""
        for key in keys:
            self.add(key, slow)

    def add_after(self, key: ObjectKey, seconds: float, *, slow: bool = False) -> None:
        """Queue the key after this many seconds, behind others if `slow`; an earlier time stays."""
        timer = self._timers.get(key)
        if timer and timer.when() <= self._loop.time() + seconds:
            return
        self._cancel(key)
        self._timers[key] = self._loop.call_later(seconds, self._fire, key, slow)

    def _fire(self, key: ObjectKey, slow: bool) -> None:
        self._timers.pop(key, None)
        self.add(key, slow)

    def _cancel(self, key: ObjectKey) -> None:
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()

    async def get(self) -> tuple[ObjectKey, float]:
        """The next key and how long it waited, in seconds; the caller must call `done`."""
        while True:
            _, _, key = await self._ready.get()
            # a key that moved to the fast lane is still in the slow one
            if key in self._waiting and key not in self._active:
                break
        self._active[key] = self._loop.time()
        self._slow.pop(key, None)
        self._cancel(key)
        return key, self._loop.time() - self._waiting.pop(key)

    def done(self, key: ObjectKey) -> None:
        """End the work on the key; if it was added meanwhile, it is ready again."""
        self._active.pop(key, None)
        if key in self._waiting:
            self._ready.put_nowait((self._slow[key], next(self._count), key))

    def retry(self, key: ObjectKey) -> float:
        """Adds the key after a pause that doubles with each failure; returns the pause."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause = doubled_pause(FIRST_RETRY, LAST_RETRY, count) * random.uniform(0.8, 1.2)
        self.retries += 1
        self.add_after(key, pause)
        return pause

    def forget(self, key: ObjectKey) -> None:
        """Reset the key's failures after a success."""
        self._failures.pop(key, None)

    def failures(self, key: ObjectKey) -> int:
        """Reconciles of the key that have failed in a row."""
        return self._failures.get(key, 0)

    @property
    def active(self) -> int:
        """Keys that are worked on."""
        return len(self._active)

    @property
    def longest(self) -> float:
        """Seconds since the start of the longest-running reconcile; 0 if none is running."""
        return self._loop.time() - min(self._active.values()) if self._active else 0.0

    def close(self) -> None:
        """Cancels all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


class WorkObserver:
    """Receives the workers' waiting times and results; the metrics implement it."""

    def record_wait(self, seconds: float) -> None:
        """A key waited this long for a worker."""

    def record_reconcile(self, seconds: float, result: str) -> None:
        """A reconcile took this long and ended as success, requeue, requeue_after or error."""


async def work(queue: WorkQueue, reconcile: Reconcile, observer: WorkObserver) -> None:
    """One worker: takes keys until it is cancelled. Errors of a reconcile are retried."""
    while True:
        key, waited = await queue.get()
        observer.record_wait(waited)
        began = time.perf_counter()
        result = "success"
        try:
            result = await _reconcile_key(queue, reconcile, key)
        finally:
            queue.done(key)
            observer.record_reconcile(time.perf_counter() - began, result)
        # neither a full queue nor a look without a request would let anybody else run
        await asyncio.sleep(0)


async def _reconcile_key(queue: WorkQueue, reconcile: Reconcile, key: ObjectKey) -> str:
    try:
        requeue_after = await reconcile(key)
    except Conflict as error:
        log.info(
            "%s changed while it was worked on; looking again", key, extra={"detail": str(error)}
        )
        queue.retry(key)
        return "requeue"
    except OperatorError as error:
        log.warning("%s: %s; trying again in %.1f s", key, error, queue.retry(key))
        return "error"
    except Exception:
        log.exception("%s: reconcile failed; trying again in %.1f s", key, queue.retry(key))
        return "error"
    queue.forget(key)
    if requeue_after is not None:
        queue.add_after(key, requeue_after)
        return "requeue_after"
    return "success"
