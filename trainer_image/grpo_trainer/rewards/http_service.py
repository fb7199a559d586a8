"""The `http` reward: POSTs batches of completions to a service and takes its numbers.

A service fails, hangs and lies, and a run of days must outlive its bad minutes: failed requests are tried again, then
their completions get no reward and are counted; only a larger share than declared ends the run. TRL awaits it together
with the other async rewards.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
from yarl import URL

from grpo_api.rewards import HTTPReward

from ..errors import RewardError
from .base import Completion, RewardCounters, Scores, checked_scores, current_step

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LONGEST_ANSWER = 16 << 20
_PERMANENT_STATUSES = frozenset(range(300, 500)) - {408, 425, 429}
"""Statuses that another try won't change; 408, 425 and 429 ask for one."""
_HOOKS = ("completion_ids", "trainer_state", "log_extra", "log_metric")

Body = dict[str, Any]


class _Failed(Exception):
    """A request that may succeed when tried again."""


class _Permanent(Exception):
    """A failure that another try would meet again."""


class HTTPFunction:
    """Async callable with TRL's reward signature; None for completions whose request failed."""

    def __init__(self, name: str, spec: HTTPReward, counters: RewardCounters, token: str | None) -> None:
        """Keeps the settings; connections are made per call, on the loop of the caller."""
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._shown = str(URL(spec.url).with_user(None).with_query(None))
        # a generator of its own: drawing from the global one would change the training's random numbers
        self._random = random.Random()

    @property
    def longest_seconds(self) -> float:
        """The most time that one call can take."""
        return self._spec.batch_timeout_seconds

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Scores:
        """One score per completion; failures are counted, and judged over all ranks by failure_limits.py."""
        step = current_step(columns)
        rows = {name: values for name, values in columns.items() if name not in _HOOKS}
        everything = {"prompts": prompts, "completions": completions, "columns": rows}
        chunks = list(_chunks(everything, self._spec.batch_size))
        async with aiohttp.ClientSession(headers=self._headers) as session:
            gate = asyncio.Semaphore(self._spec.max_concurrency)
            tasks = [asyncio.create_task(self._chunk(session, gate, chunk, step)) for chunk in chunks]
            done, late = await asyncio.wait(tasks, timeout=self._spec.batch_timeout_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        parts = [task.result() if task in done else None for task in tasks]
        sizes = [len(chunk["completions"]) for chunk in chunks]
        self._count(tasks, late, parts, sizes)
        return [score for part, size in zip(parts, sizes, strict=True) for score in part or [None] * size]

    def _count(
        self,
        tasks: list[asyncio.Task[Scores | None]],
        late: set[asyncio.Task[Scores | None]],
        parts: list[Scores | None],
        sizes: list[int],
    ) -> None:
        """Counts completions with and without a score."""
        timeouts = sum(size for task, size in zip(tasks, sizes, strict=True) if task in late)
        missing = sum(size for part, size in zip(parts, sizes, strict=True) if part is None)
        self._counters.timeouts += timeouts
        self._counters.failures += missing - timeouts
        self._counters.asked += sum(sizes)
        if late:
            self._failed(f"no answer for the batch within {self._spec.batch_timeout_seconds} s")

    def _failed(self, problem: str) -> None:
        self._counters.last_problem = f"{self._shown}: {problem}"

    async def _chunk(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, chunk: Body, step: int
    ) -> Scores | None:
        """The scores of one request, tried again as often as declared; None when all tries failed."""
        async with gate:
            for attempt in range(self._spec.retries + 1):
                if attempt:
                    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1))
                    await asyncio.sleep(self._random.uniform(0, longest))
                try:
                    return await self._post(session, chunk, step)
                except _Failed as error:
                    self._failed(str(error))
                except _Permanent as error:
                    self._failed(str(error))
                    return None
        return None

    async def _post(self, session: aiohttp.ClientSession, chunk: Body, step: int) -> Scores:
        timeout = aiohttp.ClientTimeout(total=self._spec.timeout_seconds)
        body = json.dumps(chunk, default=str).encode()
        headers = {"Content-Type": "application/json"}
        try:
            # no redirects: they would carry the token elsewhere
            async with session.post(
                self._spec.url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await _read(response)
        except TimeoutError as error:
            raise _Failed(f"no answer within {self._spec.timeout_seconds} s") from error
        except aiohttp.ClientError as error:
            raise _Failed(f"{type(error).__name__}: {error}") from error
        return self._scores(answer, len(chunk["completions"]), step)

    def _scores(self, answer: bytes, expected: int, step: int) -> Scores:
        try:
            rewards = json.loads(answer)["rewards"]
        except (ValueError, LookupError, TypeError) as error:
            raise _Failed(f'the answer is not {{"rewards": [...]}}: {answer[:80]!r}') from error
        if not isinstance(rewards, list):
            raise _Failed(f"the answer's rewards are {rewards!r:.80}, no list")
        try:
            return checked_scores(rewards, name=self.__name__, step=step, expected=expected)
        except RewardError as error:
            raise _Failed(str(error)) from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for block in response.content.iter_any():
        body += block
        if len(body) > _LONGEST_ANSWER:
            raise _Permanent(f"an answer of more than {_LONGEST_ANSWER >> 20} MiB")
    if response.status in _PERMANENT_STATUSES:
        raise _Permanent(f"HTTP {response.status}: {body[:200]!r}")
    if response.status != 200:
        raise _Failed(f"HTTP {response.status}: {body[:200]!r}")
    return body


def _chunks(everything: Body, size: int) -> Iterable[Body]:
    for start in range(0, len(everything["completions"]), size):
        part = slice(start, start + size)
        columns = {name: values[part] for name, values in everything["columns"].items()}
        yield {
            "prompts": everything["prompts"][part],
            "completions": everything["completions"][part],
            "columns": columns,
        }
