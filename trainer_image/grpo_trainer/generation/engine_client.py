"""Rank 0's side of an engine's HTTP: requests out, checked answers in, each failure as what follows
from it."""

from typing import TypeVar

import aiohttp
from pydantic import BaseModel, TypeAdapter, ValidationError

from ..engine_pod.messages import (
    ATTEMPT_HEADER,
    MAX_BODY,
    MAX_MESSAGE,
    Confirm,
    End,
    EngineState,
    Generate,
    GeneratedCompletions,
    Learn,
    Prove,
    Sync,
)
from ..engine_pod.weight_layout import Strided

T = TypeVar("T")
STATE_SECONDS = 5.0
"""An engine answers for its state at once, whatever it does."""
Prints = list[dict[str, list[int]]]
LearntLayout = tuple[dict[str, list[Strided | None]], list[str]]
_STATE: TypeAdapter[EngineState] = TypeAdapter(EngineState)
_GENERATED: TypeAdapter[GeneratedCompletions] = TypeAdapter(GeneratedCompletions)
_PRINTS: TypeAdapter[Prints] = TypeAdapter(Prints)
_LEARNT: TypeAdapter[list[LearntLayout]] = TypeAdapter(list[LearntLayout])


class EngineFailed(Exception):
    """An engine can't be used as it is; the message says why, after its name."""

    is_gone = False
    """Whether no process is left that could answer."""


class EngineUnreachable(EngineFailed):
    """The engine gave no answer, or one that broke off: its process or its network is gone."""

    def __init__(self, message: str, *, is_timeout: bool = False) -> None:
        """`is_timeout`: it may still come; otherwise no process is left that could answer."""
        super().__init__(message)
        self.is_gone = not is_timeout


class WeightsLost(EngineFailed):
    """The engine lives, but does not have the weights that it was proven to have."""


class WeightsChanged(EngineFailed):
    """The engine has other weights than it was sent."""


class RequestRejected(EngineFailed):
    """The engine refuses the request, and any other engine would refuse it too."""


class EngineClient:
    """Sends requests to one engine over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, host: str, port: int, attempt: str) -> None:
        address = f"[{host}]" if ":" in host else host
        self._session = session
        self._base = f"http://{address}:{port}"
        self._headers = {ATTEMPT_HEADER: attempt}

    async def state(self) -> EngineState:
        """The state that the engine reports."""
        return _parse_answer(_STATE, await self._ask("GET", "/state", None, STATE_SECONDS))

    async def learn(self, request: Learn, seconds: float) -> list[LearntLayout]:
        """For each worker: the parts of each tensor that it writes, and why its weights cannot be
        proven, if so."""
        return _parse_answer(_LEARNT, await self._ask("POST", "/learn", request, seconds))

    async def sync(self, request: Sync, seconds: float | None) -> None:
        """Have the engine receive the weights; return once it has all of them."""
        await self._ask("POST", "/sync", request, seconds)

    async def prints(self, version: int, seed: int, seconds: float | None) -> Prints:
        """For each worker: the hashes of the parts of each tensor."""
        return _parse_answer(
            _PRINTS, await self._ask("POST", "/prove", Prove(version=version, seed=seed), seconds)
        )

    async def confirm(self, version: int) -> None:
        """Have the engine serve the version that was proven."""
        await self._ask("POST", "/confirm", Confirm(version=version), STATE_SECONDS)

    async def end(self, reason: str, incarnation: str) -> None:
        """Have this process of the engine end, so that its pod starts another."""
        request = End(reason=reason[:MAX_MESSAGE], incarnation=incarnation)
        await self._ask("POST", "/end", request, STATE_SECONDS)

    async def generate(self, request: Generate) -> GeneratedCompletions:
        """The completions of a prompt. Has no time-out: the caller watches the progress of the
        engine.

        Raises:
            WeightsLost: the completions are of other weights.
            EngineFailed: as for all requests.
        """
        answer = _parse_answer(_GENERATED, await self._ask("POST", "/generate", request, None))
        # The engine compares them too; this finds an answer of another process under its address.
        if (answer.version, answer.incarnation) != (request.version, request.incarnation):
            raise WeightsLost(
                f"answered with version {answer.version} of incarnation {answer.incarnation[:8]}, "
                f"where version {request.version} of {request.incarnation[:8]} was asked for"
            )
        if len(answer.completions) != len(request.seeds) or any(
            len(c.tokens) != len(c.logprobs) for c in answer.completions
        ):
            raise EngineFailed(
                f"answered {len(answer.completions)} completions instead of {len(request.seeds)}, "
                "or parts of them"
            )
        return answer

    async def _ask(
        self, method: str, path: str, body: BaseModel | None, seconds: float | None
    ) -> bytes:
        """Return the answer's body.

        Raises:
            EngineFailed: no usable answer; its subclass says what follows from that.
        """
        data = body.model_dump_json().encode() if body is not None else None
        # Sampling may take long, but a process that lives accepts a connection at once.
        timeout = aiohttp.ClientTimeout(total=seconds, connect=STATE_SECONDS)
        try:
            async with self._session.request(
                method, self._base + path, data=data, headers=self._headers, timeout=timeout
            ) as answer:
                text = await _read_body(answer.content)
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnreachable(
                f"took no connection for {path} at {self._base} within {STATE_SECONDS:.0f} s; "
                "check whether its pod runs, and whether a NetworkPolicy lets the job's pods reach "
                "it",
                is_timeout=True,
            ) from error
        except TimeoutError as error:
            limit = f" within {seconds:.0f} s" if seconds is not None else ""
            raise EngineUnreachable(f"did not answer {path}{limit}", is_timeout=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(
                f"can't be reached for {path}: {error or type(error).__name__}"
            ) from error
        reason = text[:500].decode(errors="replace")
        # The request itself is at fault, so no other engine would take it.
        if answer.status in (400, 413):
            raise RequestRejected(f"does not take {path}: {reason}")
        if answer.status == 409:
            raise WeightsLost(f"refused {path}: {reason}")
        if answer.status != 200:
            raise EngineFailed(f"answered {path} with {answer.status}: {reason}")
        return text


async def _read_body(content: aiohttp.StreamReader) -> bytes:
    # Piece by piece, so that a wrong answer can't fill rank 0's memory.
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_chunked(2**20):
        size += len(part)
        if size > MAX_BODY:
            raise aiohttp.ClientPayloadError(f"more than {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


def _parse_answer(kind: TypeAdapter[T], text: bytes) -> T:
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        raise EngineFailed(f"answered what can't be read: {str(error)[:200]}") from error
