"""An engine pod's HTTP server: weights come in and are proven, completions go out, each under a
proven version.

    GET  /healthz    it runs
    GET  /state      EngineState
    POST /learn      where each tensor goes, by worker
    POST /sync       receive a version of the weights over a weight group
    POST /prove      hash them where they lie, by worker
    POST /confirm    the hashes are the trainer's: serve them
    POST /generate   complete one prompt under a version
    POST /end        the trainer has given this process up

All but the first answer their own attempt alone. Prometheus asks another port, which answers
nothing else: the NetworkPolicy lets it in there alone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from .engine_metrics import EngineMetrics
from .hash_check import config_fingerprint
from .messages import (
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
    RequestInvalid,
    Sync,
)
from .served_version import RequestRefused, ServedWeights

if TYPE_CHECKING:
    from .sampler import Sampler

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """Answers for one engine process."""

    def __init__(self, sampler: "Sampler", attempt: str) -> None:
        """`attempt` as the header names it."""
        self._sampler = sampler
        self._attempt = attempt
        self._served = ServedWeights()
        self._shapes: dict[str, list[int]] = {}
        self.end_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once the trainer has given this process up."""
        self._heard_at = asyncio.get_running_loop().time()

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/state", self._state)
        for name in ("learn", "sync", "prove", "confirm", "generate", "end"):
            application.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets in what comes from the own attempt, and puts what goes wrong into an answer."""
        # Only the trainer's own requests show that it lives: probes go on without it.
        if request.path != "/healthz":
            if request.headers.get(ATTEMPT_HEADER) != self._attempt:
                raise web.HTTPForbidden(text=f"this engine belongs to attempt {self._attempt}")
            self._heard_at = asyncio.get_running_loop().time()
        try:
            return await handler(request)
        except RequestRefused as refused:
            raise web.HTTPConflict(text=str(refused)[:MAX_MESSAGE]) from refused
        except web.HTTPException:
            raise
        # Of any kind, from vLLM: the client gets it, and the engine goes on.
        except Exception as error:
            log.exception("a request failed")
            raise web.HTTPInternalServerError(
                text=f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            ) from error

    def silent_seconds(self) -> float:
        """Return the time since the last request of the own attempt, in seconds."""
        return asyncio.get_running_loop().time() - self._heard_at

    def state(self) -> EngineState:
        """The weights' state with the load."""
        load = self._sampler.load
        return self._served.state().model_copy(
            update={
                "waiting": load.waiting,
                "cache_used": load.cache_used,
                "tokens": load.tokens,
            }
        )

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _state(self, _: web.Request) -> web.Response:
        return _json(self.state())

    async def _learn(self, request: web.Request) -> web.Response:
        """By worker: for each tensor the slices of it that the worker holds, and why there is no
        proof, if so."""
        message = await _body(request, Learn)
        if message.config and message.config != config_fingerprint(self._sampler.folder):
            raise RequestRefused(
                f"{self._sampler.folder}: config.json or the tokenizer is another than rank 0's; "
                "compare the model's files on the nodes, or set spec.model.revision"
            )
        self._shapes = message.shapes
        # Learning overwrites the weights that were there.
        self._served.record_failure()
        return web.json_response(
            await self._sampler.call("weights_learn", message.shapes, message.dtype)
        )

    async def _sync(self, request: web.Request) -> web.Response:
        message = await _body(request, Sync)
        # What was never learnt can't be proven, so none of it is received.
        unknown = [name for name in message.names if name not in self._shapes]
        if unknown:
            raise web.HTTPBadRequest(
                text=f"{len(unknown)} tensors were never learnt, the first is {unknown[0]}"
            )
        self._served.begin_sync()
        try:
            tensors = [(name, self._shapes[name]) for name in message.names]
            await self._sampler.call("weights_receive", message.meeting, message.version, tensors)
            # The prefix cache has keys and values that the earlier weights computed.
            await self._sampler.reset_prefix_cache()
        # Also where the trainer gave the request up: some tensors are new by then, others old.
        except BaseException:
            self._served.record_failure()
            raise
        self._served.record_received(message.version)
        return _json(self.state())

    async def _prove(self, request: web.Request) -> web.Response:
        """By worker: for each tensor the hash of every slice."""
        message = await _body(request, Prove)
        self._served.require_received(message.version)
        return web.json_response(await self._sampler.call("weights_prints", message.seed))

    async def _confirm(self, request: web.Request) -> web.Response:
        self._served.confirm((await _body(request, Confirm)).version)
        return _json(self.state())

    async def _generate(self, request: web.Request) -> web.Response:
        message = await _body(request, Generate)
        admitted = self._served.admit(message.version, message.incarnation)
        try:
            completions = await self._sampler.sample(message)
        except RequestInvalid as error:
            raise web.HTTPBadRequest(text=str(error)[:MAX_MESSAGE]) from error
        # If a sync began while tokens were sampled, some of them are of other weights.
        self._served.require_no_sync_since(admitted)
        answer = GeneratedCompletions(
            version=message.version, incarnation=self._served.incarnation, completions=completions
        )
        return _json(answer)

    async def _end(self, request: web.Request) -> web.Response:
        message = await _body(request, End)
        if message.incarnation != self._served.incarnation:
            raise RequestRefused(
                f"this is incarnation {self._served.incarnation}, not {message.incarnation}"
            )
        if not self.end_reason.done():
            self.end_reason.set_result(message.reason)
        return web.Response(text="ok\n")


def metrics_application() -> web.Application:
    """The page that Prometheus reads: vLLM's metrics and this process's own."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(EngineMetrics())
    ProcessCollector(registry=registry)

    async def serve_metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/metrics", serve_metrics)
    return application


async def _body(request: web.Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        raise web.HTTPBadRequest(text=str(error)[:MAX_MESSAGE]) from error


def _json(answer: BaseModel) -> web.Response:
    return web.json_response(text=answer.model_dump_json())


async def serve_application(application: web.Application, host: str | None, port: int) -> None:
    """Serve on an address, by default on all. A request that the trainer gives up is cancelled, and
    its sampling ends.

    Raises:
        OSError: the port is taken.
    """
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
