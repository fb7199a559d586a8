"""Pulls /progress from rank 0 of every gang that may train, by its pod's address.

Training pods have no API credentials, so they can't report by themselves. A pull that fails means
"unknown", never a failure: its target is asked less often. Concurrency, time and size of an answer
are bounded, since what answers is the user's code. Targets that answer at once, slow ones and those
that failed last have a lane each. So any number of targets that can't be reached never delays the
others.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from grpo_api.report.report import STEP_STAGES, Progress
from grpo_api.status.status import ConditionType
from grpo_api.text.contract import PROGRESS_PORT, TRACE_QUERY
from grpo_api.text.messages import connection_problem
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, doubled_pause
from grpo_kube.transport import read_beginning

from ..decide.observation import Pull, Silence
from ..pods.roles import replicas
from ..records.records import GRPOJobRecord, PodRecord

log = logging.getLogger(__name__)

MAX_ANSWER = 256 * 1024
"""Bytes: what answers is the user's code, and an answer without an end must not fill the memory."""
TIMEOUT = 3.0
QUICK = 0.25
"""Seconds within which targets of the quick lane answer; a silent one blocks it no longer."""
QUICK_PLACES, SLOW_PLACES, FAILING_PLACES = 64, 32, 16
"""Targets asked at a time: those that answered quickly last, slowly, and not at all."""
SLOWEST = 60.0
"""Longest pause between two pulls of a target that does not answer, in seconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """Rank 0 of a running attempt."""

    key: ObjectKey
    uid: str
    """uid of the pod."""
    ip: str
    job_uid: str
    attempt: int


def targets(
    jobs: Iterable[GRPOJobRecord], pods: Callable[[ObjectKey], Iterable[PodRecord]]
) -> Iterator[Target]:
    """Yield rank 0 of every gang that runs, or starts with engines: it may begin without some.

    Pods of an older job of that name may answer for as long as they take to end.
    """
    for job in jobs:
        if job.is_active and (job.is_true(ConditionType.RUNNING) or replicas(job.status.plan)):
            for pod in pods(job.key):
                rank0 = pod.index == 0 and not pod.engine
                if (
                    rank0
                    and pod.controller_uid == job.status.job_uid
                    and pod.phase == "Running"
                    and pod.ip
                ):
                    yield Target(job.key, pod.uid, pod.ip, job.uid, job.status.attempt)


@dataclass(slots=True)
class _State:
    target: Target
    due: float
    heard_at: Observed
    """When it answered last; before that, when it was asked first."""
    failures: int = 0
    slow: bool = False
    """True if the last answer took longer than QUICK, or its quick pull got none."""
    problem: str = ""
    pull: Pull | None = None


class PullFailed(Exception):
    """A target did not answer with a Progress."""


class _Gone(Exception):
    """The target was gone before its turn came."""


Fetch = Callable[[Target], Awaitable[Progress]]


class ProgressPuller:
    """Asks every target once per interval and keeps the last answer."""

    def __init__(
        self,
        targets: Callable[[], Iterable[Target]],
        fetch: Fetch,
        changed: Callable[[ObjectKey], None],
        interval: float,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`fetch` asks a target; `changed` gets each answer's job; `count` success or error."""
        self._targets = targets
        self._fetch = fetch
        self._changed = changed
        self._interval = interval
        self._count = count
        self._states: dict[ObjectKey, _State] = {}
        self._flying: set[asyncio.Task[None]] = set()
        self._quick = asyncio.Semaphore(QUICK_PLACES)
        self._slow = asyncio.Semaphore(SLOW_PLACES)
        self._failing = asyncio.Semaphore(FAILING_PLACES)

    def pull(self, job: GRPOJobRecord) -> Pull | None:
        """The last answer of the attempt's rank 0, if its pod is still the one that gave it."""
        state = self._state_of(job)
        return state.pull if state else None

    def silence(self, job: GRPOJobRecord) -> Silence | None:
        """Return since when and why the attempt's rank 0 does not answer; None while it does."""
        state = self._state_of(job)
        if state is None or not state.failures:
            return None
        return Silence(state.heard_at, state.problem)

    def _state_of(self, job: GRPOJobRecord) -> _State | None:
        """What is known of the attempt's rank 0. Until the next tick that of an earlier attempt
        may be there, or of an older job of that name."""
        state = self._states.get(job.key)
        if state is None:
            return None
        is_current = (state.target.job_uid, state.target.attempt) == (job.uid, job.status.attempt)
        return state if is_current else None

    async def run(self) -> None:
        """Pulls until cancelled."""
        try:
            while True:
                self.tick(asyncio.get_running_loop().time())
                await asyncio.sleep(min(1.0, self._interval / 4))
        finally:
            for task in self._flying:
                task.cancel()

    def tick(self, now: float) -> None:
        """Starts the pulls that are due and forgets targets that are gone."""
        # By the pod's uid: the rank 0 of another attempt starts without its predecessor's failures
        # and answers.
        targets = {target.key: target for target in self._targets()}
        for key in [
            key
            for key, state in self._states.items()
            if key not in targets or targets[key].uid != state.target.uid
        ]:
            del self._states[key]
        for key, target in targets.items():
            state = self._states.setdefault(key, _State(target, now, Observed(now)))
            if state.due <= now:
                # not due again while its pull is under way
                state.due = float("inf")
                task = asyncio.create_task(self._pull(target, state))
                # the event loop itself keeps only weak references to tasks
                self._flying.add(task)
                task.add_done_callback(self._flying.discard)

    async def _pull(self, target: Target, state: _State) -> None:
        try:
            progress = await self._query_target(target, state)
        except _Gone:
            return
        except Exception as error:
            # What answers is the user's code: whatever it makes go wrong, it is asked again.
            if not isinstance(error, PullFailed):
                log.exception("%s: the pull from %s failed", target.key, target.ip)
            state.failures += 1
            state.problem = str(error)
            self._count("error")
            log.debug("%s: no progress from %s: %s", target.key, target.ip, error)
            # The first failure begins a silence; later ones are no news.
            if state.failures == 1:
                self._changed(target.key)
        else:
            state.failures = 0
            state.heard_at = Observed(asyncio.get_running_loop().time())
            state.pull = next_pull(state.pull, progress, state.heard_at)
            self._count("success")
            self._changed(target.key)
        # Targets that can't be reached are asked less and less, so that any number of them costs
        # little.
        pause = self._interval
        if state.failures:
            pause = doubled_pause(2 * self._interval, SLOWEST, state.failures)
        # With jitter: jobs that started together would be asked at the same moment, for ever.
        state.due = asyncio.get_running_loop().time() + pause * random.uniform(0.9, 1.1)

    async def _query_target(self, target: Target, state: _State) -> Progress:
        """The target's answer in its lane, or PullFailed; one that is not quick is asked again with
        more patience."""
        # A target that falls silent holds a quick place for QUICK seconds only; then it waits in
        # the slow lane.
        if not state.failures and not state.slow:
            try:
                return await self._pull_in_lane(self._quick, QUICK, target, state)
            except TimeoutError:
                state.slow = True
        try:
            return await self._pull_in_lane(
                self._failing if state.failures else self._slow, TIMEOUT, target, state
            )
        except TimeoutError as error:
            raise PullFailed(f"no answer within {TIMEOUT:.0f} s") from error

    async def _pull_in_lane(
        self, lane: asyncio.Semaphore, seconds: float, target: Target, state: _State
    ) -> Progress:
        """The answer, if it comes within that time from the turn in the lane."""
        loop = asyncio.get_running_loop()
        async with lane:
            # A turn may come long after the pull was due: the pod may be gone, and its address
            # another pod's.
            if self._states.get(target.key) is not state:
                raise _Gone
            began = loop.time()
            async with asyncio.timeout(seconds):
                progress = await self._fetch(target)
            state.slow = loop.time() - began > QUICK
            return progress


def next_pull(last: Pull | None, progress: Progress, at: Observed) -> Pull:
    """A new answer after the last: it has advanced when its step, its stage or its number of events
    has changed.

    While it trains, only a step counts: what else happens, happens within a step.
    """
    advanced_at = at
    if last and _progress_key(last.progress) == _progress_key(progress):
        advanced_at = last.advanced_at
    return Pull(progress, at, advanced_at)


def _progress_key(progress: Progress) -> tuple[int, str, int]:
    if progress.stage in STEP_STAGES:
        return progress.step, "Training", 0
    return progress.step, progress.stage, progress.events


def http_fetch(
    session: aiohttp.ClientSession, port: int = PROGRESS_PORT, trace_every: int | None = None
) -> Fetch:
    """Return a Fetch over HTTP.

    `trace_every`: ask for the times of every such step; None: of no step.
    """
    path = "progress" if trace_every is None else f"progress?{TRACE_QUERY}={trace_every}"

    async def fetch(target: Target) -> Progress:
        # an IPv6 address needs brackets in a URL
        host = f"[{target.ip}]" if ":" in target.ip else target.ip
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        try:
            url = f"http://{host}:{port}/{path}"
            # Redirects are not followed: what answers is the user's code, and the operator reaches
            # what that doesn't.
            async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise PullFailed(f"HTTP {answer.status}")
                text = await read_beginning(answer.content, MAX_ANSWER + 1)
            if len(text) > MAX_ANSWER:
                raise PullFailed(f"the answer is longer than {MAX_ANSWER} bytes")
            return Progress.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            wrong = sorted({str(problem["loc"][0]) for problem in error.errors() if problem["loc"]})
            fields = f": {', '.join(wrong[:3])}" if wrong else ""
            raise PullFailed(f"{host}:{port}: the answer is no Progress{fields}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PullFailed(connection_problem(error, f"{host}:{port}")) from error

    return fetch
