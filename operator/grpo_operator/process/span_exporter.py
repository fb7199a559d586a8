"""Sends spans to an OpenTelemetry collector by OTLP/HTTP in JSON, in the background.

A slow or missing collector delays no reconcile: spans queue up to a bound, and what comes then is
dropped and counted. A batch that the collector can't take now is sent again, with growing pauses or
when the collector says.
"""

import asyncio
import json
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

import aiohttp

from grpo_api.text.clock import requested_pause
from grpo_kube.pacing import Backoff
from grpo_kube.transport import read_beginning

from ..tracing.spans import Span, export_request

log = logging.getLogger(__name__)

BACKLOG = 8192
"""Spans that wait at most; one takes about a kilobyte."""
BATCH = 128
"""Spans of a request: what takes a few milliseconds to write, in which nothing else runs."""
LINGER = 1.0
"""Seconds for which spans wait for company."""
TIMEOUT = 10.0
FLUSH = 3.0
"""Seconds in which the spans that are left are sent at the end of the process."""
LONGEST_PAUSE = 300.0
"""The longest Retry-After, in seconds, that is waited for."""
MAX_ANSWER = 64 * 1024
"""Bytes of an answer that are read: a proxy before the collector may answer with any page."""
AGAIN = (429, 502, 503, 504)
"""Answers after which the same request may be taken later (OTLP/HTTP, "Retryable")."""
PATH = "/v1/traces"


class NotNow(Exception):
    """The collector can't take the batch now."""

    def __init__(self, problem: str, pause: float = 0.0) -> None:
        """`pause` is the Retry-After of the collector's answer in seconds; 0 without one."""
        super().__init__(problem)
        self.pause = pause


class SpanExporter:
    """Sends spans in batches, oldest first, one request at a time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: str,
        headers: Mapping[str, str],
        count: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """`count` hears how many spans were `sent`, `refused` by the collector or `dropped`."""
        self._session = session
        self._url = endpoint.rstrip("/") + PATH
        self._headers = {**headers, "Content-Type": "application/json"}
        self._count = count
        self._waiting: deque[Span] = deque()
        self._some = asyncio.Event()
        self._full = False
        self._logged_problems: set[str] = set()

    def put(self, span: Span) -> None:
        """Queues a span, or drops it."""
        if len(self._waiting) >= BACKLOG:
            self._count("dropped", 1)
            if not self._full:
                log.warning("spans are dropped: %d wait for the collector", BACKLOG)
            self._full = True
            return
        self._full = False
        self._waiting.append(span)
        self._some.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(LINGER)
            await self._send_all()

    async def flush(self) -> None:
        """Send what would be lost with the process, for a few seconds."""
        try:
            async with asyncio.timeout(FLUSH):
                while self._waiting:
                    await self._send_batch()
        except (NotNow, TimeoutError) as error:
            self._count("dropped", len(self._waiting))
            log.warning("%d spans are dropped at the end: %s", len(self._waiting), error)

    async def _send_all(self) -> None:
        backoff = Backoff()
        while self._waiting:
            try:
                await self._send_batch()
            except NotNow as error:
                self._log_once("spans wait: %s", str(error))
                if error.pause:
                    await asyncio.sleep(error.pause * random.uniform(1.0, 1.1))
                else:
                    await backoff.wait()
            else:
                backoff.reset()
        self._some.clear()

    async def _send_batch(self) -> None:
        """Send the oldest spans, which wait until the collector has answered for good; NotNow if
        it can't take them."""
        # Spans stay in the queue until the answer is there, so that a lost connection loses none.
        batch = list(islice(self._waiting, BATCH))
        status, text = await self._post(json.dumps(export_request(batch)).encode())
        for _ in batch:
            self._waiting.popleft()
        refused, why = _rejected_spans(text)
        if status // 100 != 2:
            refused, why = len(batch), f"HTTP {status}: {text[:200]!r}"
        # A page comes from another server at that address: OTLP answers in JSON.
        elif text.lstrip().startswith(b"<"):
            refused, why = len(batch), f"a page, so no collector's: {text[:200]!r}"
        # The collector's number may be anything; more than were sent can't have been refused.
        refused = min(refused, len(batch))
        self._count("sent", len(batch) - refused)
        self._count("refused", refused)
        if refused or why:
            self._log_once("the collector refuses spans: %s", why)
        else:
            self._logged_problems.clear()

    def _log_once(self, message: str, why: str) -> None:
        """Log a problem of a kind, once until the collector has taken a batch whole."""
        if message not in self._logged_problems:
            log.warning(message, why)
        self._logged_problems.add(message)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        """Status and the beginning of the answer."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as answer:
                # every other answer is final: OTLP names only these as retryable
                if answer.status in AGAIN:
                    pause = requested_pause(answer.headers, LONGEST_PAUSE)
                    raise NotNow(f"HTTP {answer.status}", pause)
                return answer.status, await read_beginning(answer.content, MAX_ANSWER)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NotNow(repr(error)) from error


def _rejected_spans(text: bytes) -> tuple[int, str]:
    """How many spans an answer of success refuses, and why: its `partialSuccess`."""
    try:
        partial = json.loads(text or b"{}")["partialSuccess"]
        return max(0, int(partial.get("rejectedSpans", 0))), str(partial.get("errorMessage", ""))[
            :200
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return 0, ""
