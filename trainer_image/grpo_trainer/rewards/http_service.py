"""The `http` reward: POSTs batches of completions to a service and takes its numbers.

A service fails, hangs and lies, and a run of days must outlive its bad minutes. Failed requests are
tried again until the batch's time is up. Then their completions get no reward and are counted
(reward_set.py). TRL awaits it together with the other async rewards.
"""

import asyncio
import json
import logging
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from grpo_api.spec.rewards import HTTPReward
from grpo_api.text.clock import requested_pause
from grpo_api.text.messages import connection_problem

from ..runtime.clock import OnWait, ignore_wait
from ..runtime.errors import BadInput, RewardError
from .reward_base import Completion, RewardCounters, Scores, checked_scores, current_step

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0
"""Seconds; by so much at most a service's return is noticed late."""
_CANCEL_AGAIN = 0.1
"""Seconds, less than any pause, after which a task that goes on is cancelled once more."""
_LONGEST_ASKED = 60.0
"""Seconds of Retry-After that are believed."""
_LONGEST_ANSWER = 16 << 20
_PERMANENT_STATUSES = frozenset(range(300, 500)) - {408, 425, 429}
"""Statuses that another try won't change; 408, 425 and 429 ask for one."""
_HOOKS = ("completion_ids", "trainer_state", "log_extra", "log_metric")

Body = dict[str, Any]


class _Passing(Exception):
    """A failure that another try may not meet."""

    def __init__(self, problem: str, quoted: str = "", retry_after: float = 0.0) -> None:
        """`quoted` is what the service answered, `retry_after` the pause in seconds that it asks
        for."""
        super().__init__(f"{problem}: {quoted}" if quoted else problem)
        self.quoted = quoted
        self.problem = problem
        self.retry_after = retry_after


class _Permanent(Exception):
    """A failure that another try would meet again."""


class HTTPFunction:
    """Async callable with TRL's reward signature; None for completions whose request failed."""

    def __init__(
        self,
        name: str,
        spec: HTTPReward,
        counters: RewardCounters,
        token: str | None,
        on_wait: OnWait = ignore_wait,
    ) -> None:
        """Keeps the settings; connections are made per call, on the loop of the caller.

        `on_wait` is called with the reason why the service is asked again.

        Raises:
            BadInput: the URL has no host, or a port that can't be; the token is of several lines.
        """
        self.__name__ = name
        if token and not token.isprintable():
            raise BadInput(
                f"reward {name!r}: the token in the Secret of http.tokenSecretRef has a line break "
                "or another control character, which no header can have; store it as one line"
            )
        self._spec = spec
        self._counters = counters
        self._on_wait = on_wait
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            address = URL(spec.url)
            # No resolver takes a name that this refuses: each request would raise it.
            (address.host or "").encode("idna")
            self._shown = str(address.with_user(None).with_query(None))
            self._proxy = _environment_proxy(address)
        except ValueError as error:
            raise BadInput(
                f"reward {name!r}: http.url is not the address of a service: {error}; correct it"
            ) from error
        self.last_try = ""
        """Why the last try of this batch failed; empty if none did."""
        # a generator of its own: drawing from the global one would change the training's random
        # numbers
        self._random = random.Random()

    @property
    def longest_seconds(self) -> float:
        """The most time that one call can take."""
        return self._spec.batch_timeout_seconds

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any
    ) -> Scores:
        """One score per completion; failures are counted, and judged over all ranks by
        FailureLimits."""
        self.last_try = ""
        step = current_step(columns)
        rows = {name: values for name, values in columns.items() if name not in _HOOKS}
        everything = {"prompts": prompts, "completions": completions, "columns": rows}
        chunks = list(_chunks(everything, self._spec.batch_size))
        async with aiohttp.ClientSession(headers=self._headers) as session:
            gate = asyncio.Semaphore(self._spec.max_concurrency)
            tasks = [
                asyncio.create_task(self._chunk(session, gate, chunk, step)) for chunk in chunks
            ]
            finished_tasks, unfinished_tasks = await asyncio.wait(
                tasks, timeout=self._spec.batch_timeout_seconds
            )
            # Until they end: aiohttp (3.14) takes a cancellation that meets the time-out of a
            # request for that time-out, after which the request would be tried again for ever.
            pending_tasks = unfinished_tasks
            while pending_tasks:
                for task in pending_tasks:
                    task.cancel()
                _, pending_tasks = await asyncio.wait(pending_tasks, timeout=_CANCEL_AGAIN)
        self._on_wait("")
        scores: Scores = []
        missing = too_late = 0
        for task, chunk in zip(tasks, chunks, strict=True):
            size = len(chunk["completions"])
            part = task.result() if task in finished_tasks else None
            scores += part or [None] * size
            if part is None:
                missing += size
            if task in unfinished_tasks:
                too_late += size
        self._count(missing, too_late)
        return scores

    def _count(self, missing: int, timeouts: int) -> None:
        """Count the completions without a score, of which those that are late could still have got
        one."""
        if missing > timeouts:
            self._counters.count_failures(missing - timeouts, f"{self._shown}: {self.last_try}")
        if timeouts:
            limit = f"batchTimeoutSeconds = {self._spec.batch_timeout_seconds}"
            last = f"; the last try: {self.last_try}" if self.last_try else ""
            self._counters.count_timeouts(
                timeouts, f"{self._shown}: no answer within {limit}{last}"
            )

    async def _chunk(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, chunk: Body, step: int
    ) -> Scores | None:
        """The scores of one request, tried again until they come; None where another try would not
        help.

        It waits outside the gate, so that others get their turn.
        """
        failures = 0
        while True:
            try:
                async with gate:
                    scores = await self._post(session, chunk, step)
            except _Permanent as error:
                self.last_try = str(error)
                return None
            except _Passing as error:
                self._record_problem(str(error))
                self._on_wait(self._wait_reason(error))
                await asyncio.sleep(error.retry_after + self._pause(failures))
                failures += 1
            else:
                self._on_wait("")
                return scores

    def _wait_reason(self, error: _Passing) -> str:
        """Why the service is waited for, without what it answered: that may quote a completion, and
        everybody who reads /progress sees this."""
        if error.quoted:
            return f"{self._shown}: {error.problem}"
        return connection_problem(error, self._shown)

    def _record_problem(self, problem: str) -> None:
        """Remember why a try failed, and say so in the log once per batch: a run that waits must
        not look stuck."""
        if not self.last_try:
            limit = f"until batchTimeoutSeconds = {self._spec.batch_timeout_seconds} are over"
            log.warning(f"reward {self.__name__!r} tries again {limit}: {self._shown}: {problem}")
        self.last_try = problem

    def _pause(self, failures: int) -> float:
        """Seconds before the next try: doubled with every failure, up to the longest, of which half
        is left to chance.

        The ranks of a gang thus don't come back to a service that has just recovered all at once.
        """
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures, 30))
        return self._random.uniform(longest / 2, longest)

    async def _post(self, session: aiohttp.ClientSession, chunk: Body, step: int) -> Scores:
        timeout = aiohttp.ClientTimeout(total=self._spec.timeout_seconds)
        body = json.dumps(_without_nan(chunk), default=str).encode()
        headers = {"Content-Type": "application/json"}
        try:
            # no redirects: they would carry the token elsewhere
            async with session.post(
                self._spec.url,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                proxy=self._proxy,
            ) as response:
                answer = await _read_body(response)
        except TimeoutError as error:
            raise _Passing(f"no answer within {self._spec.timeout_seconds} s") from error
        except aiohttp.ClientError as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        return self._scores(answer, len(chunk["completions"]), step)

    def _scores(self, answer: bytes, expected: int, step: int) -> Scores:
        try:
            rewards = json.loads(answer)["rewards"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            begin = _shown_text(answer, 80)
            raise _Passing('the answer is not {"rewards": [...]}', begin) from error
        if not isinstance(rewards, list):
            raise _Passing("the answer's rewards are no list", f"{rewards!r:.80}")
        try:
            return checked_scores(rewards, name=self.__name__, step=step, expected=expected)
        except RewardError as error:
            raise _Passing("the answer's rewards can't be used", str(error)) from error


def _environment_proxy(address: URL) -> URL | None:
    """The proxy that the environment names for an address; None if it is to be reached directly.

    HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY mean what they mean to the hub's client.
    aiohttp's own trust_env also reads ~/.netrc, and refuses its password beside our token.
    """
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(f"{address.host}:{address.port}"):
        return None
    return URL(proxy if "://" in proxy else f"http://{proxy}")


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for block in response.content.iter_any():
        body += block
        if len(body) > _LONGEST_ANSWER:
            raise _Permanent(f"an answer of more than {_LONGEST_ANSWER >> 20} MiB")
    if response.status in _PERMANENT_STATUSES:
        raise _Permanent(f"HTTP {response.status}: {_shown_text(body, 200)}")
    if response.status != 200:
        pause = requested_pause(response.headers, _LONGEST_ASKED)
        raise _Passing(f"HTTP {response.status}", _shown_text(body, 200), pause)
    return body


def _shown_text(body: bytes, most: int) -> str:
    """The beginning of an answer as text, for messages."""
    return body[:most].decode(errors="replace")


def _without_nan(value: Any) -> Any:
    """The value with null for what JSON has no number for: a service may refuse the whole body."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return [_without_nan(part) for part in value] if isinstance(value, list) else value


def _chunks(everything: Body, size: int) -> Iterable[Body]:
    for start in range(0, len(everything["completions"]), size):
        part = slice(start, start + size)
        columns = {name: values[part] for name, values in everything["columns"].items()}
        yield {
            "prompts": everything["prompts"][part],
            "completions": everything["completions"][part],
            "columns": columns,
        }
