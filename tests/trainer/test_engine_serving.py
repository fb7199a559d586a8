"""An engine pod's HTTP server, with a sampler that needs no vLLM: what it answers, to whom, and
what it refuses."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_trainer.engine_pod.engine_http import EngineServer
from grpo_trainer.engine_pod.hash_check import config_fingerprint
from grpo_trainer.engine_pod.messages import (
    ATTEMPT_HEADER,
    Completion,
    EngineState,
    Generate,
    GeneratedCompletions,
    Learn,
    RequestInvalid,
    Sync,
)
from grpo_trainer.generation.engine_client import (
    EngineClient,
    EngineFailed,
    EngineUnreachable,
    RequestRejected,
    WeightsLost,
)
from tests.virtual_time import virtually

pytestmark = pytest.mark.realtime

ATTEMPT = "uid/1"
PATIENCE = 60.0
"""Of a request to a server in this process: only against hangs."""
SHAPES = {"a": [2], "b": [3, 4]}


class FakeLoad:
    """An idle engine's."""

    running, waiting, cache_used, tokens = 1, 2, 0.25, 40


class FakeSampler:
    """What the server asks of vLLM."""

    load = FakeLoad()

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.forgot = 0
        self.failure: Exception | None = None
        self.sampling = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, arguments))
        if self.failure is not None:
            raise self.failure
        answers: dict[str, Any] = {
            "weights_learn": ({"a": [], "b": []}, []),
            "weights_prints": {"a": [2**64 - 1], "b": [0]},
        }
        return [answers.get(method)]

    async def reset_prefix_cache(self) -> None:
        self.forgot += 1

    async def sample(self, request: Generate) -> list[Completion]:
        self.sampling.set()
        await self.go_on.wait()
        if "bad" in request.sampling:
            raise RequestInvalid("no such setting")
        if request.sampling.get("answered_with") == "nonsense":
            raise ValueError("zip() argument 2 is shorter than argument 1")
        if "answered_with" in request.sampling:
            return [Completion(tokens=request.sampling["answered_with"], logprobs=[])]
        return [Completion(tokens=[seed], logprobs=[-0.5]) for seed in request.seeds]


class World:
    """A server, its sampler and a client."""

    def __init__(
        self, server: EngineServer, sampler: FakeSampler, session: ClientSession, port: int
    ) -> None:
        self.server, self.sampler, self.session = server, sampler, session
        self.client = EngineClient(session, "127.0.0.1", port, ATTEMPT)
        self.stranger = EngineClient(session, "127.0.0.1", port, "uid/2")
        self.base = f"http://127.0.0.1:{port}"

    async def serve(self, version: int) -> None:
        """Bring a version and confirm it."""
        await self.client.learn(Learn(shapes=SHAPES, dtype="float32"), PATIENCE)
        await self.client.sync(
            Sync(version=version, meeting={"name": "m"}, names=list(SHAPES)), PATIENCE
        )
        await self.client.confirm(version)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    sampler = FakeSampler()
    server = EngineServer(sampler, ATTEMPT)  # type: ignore[arg-type]
    async with (
        TestServer(server.application(), host="127.0.0.1") as running,
        ClientSession() as session,
    ):
        assert running.port is not None
        yield World(server, sampler, session, running.port)


def wanted(incarnation: str, version: int = 3, **sampling: Any) -> Generate:
    return Generate(
        version=version, incarnation=incarnation, prompt=[1, 2], seeds=[5, 6], sampling=sampling
    )


async def test_weights_come_in_are_proven_and_sampled_with(world: World) -> None:
    assert (await world.client.state()).phase == "Waiting"
    await world.serve(3)
    method, (meeting, version, tensors) = world.sampler.calls[-1]
    assert (method, meeting, version) == ("weights_receive", {"name": "m"}, 3)
    assert [list(one) for one in tensors] == [["a", [2]], ["b", [3, 4]]]
    assert world.sampler.forgot == 1, "what is cached of earlier weights is forgotten"
    assert await world.client.prints(3, 11, PATIENCE) == [{"a": [2**64 - 1], "b": [0]}]
    state = await world.client.state()
    assert (state.phase, state.version, state.waiting, state.tokens) == ("Serving", 3, 2, 40)
    answer = await world.client.generate(wanted(state.incarnation))
    assert [one.tokens for one in answer.completions] == [[5], [6]]
    assert (answer.version, answer.incarnation) == (3, state.incarnation)


async def test_an_engine_with_another_configuration_is_refused(
    world: World, tmp_path: Path
) -> None:
    sampler: Any = world.sampler
    sampler.folder = tmp_path

    def write(**changes: Any) -> str:
        config = {"rms_norm_eps": 1e-6, "rope": {"theta": 1e4}, "transformers_version": "5.0"}
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return config_fingerprint(tmp_path)

    request = Learn(shapes=SHAPES, dtype="float32", config=write())
    assert write(transformers_version="5.1") == request.config
    await world.client.learn(request, PATIENCE)
    for changes in ({"rms_norm_eps": 1e-5}, {"rope": {"theta": 1e6}}):
        write(**changes)
        with pytest.raises(WeightsLost, match=r"config\.json or .* is another than rank 0's"):
            await world.client.learn(request, PATIENCE)


async def test_an_engine_with_another_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    """It would end completions at other stop strings than the trainer finds."""
    sampler: Any = world.sampler
    sampler.folder = tmp_path
    (tmp_path / "config.json").write_text("{}")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    config = config_fingerprint(tmp_path)
    request = Learn(shapes=SHAPES, dtype="float32", config=config)
    await world.client.learn(request, PATIENCE)
    tokenizer.write_text('{"model": {"vocab": {"b": 0, "a": 1}}}')
    with pytest.raises(WeightsLost, match=r"the tokenizer is another than rank 0's"):
        await world.client.learn(request, PATIENCE)


async def test_what_was_not_confirmed_is_not_sampled_with(world: World) -> None:
    incarnation = (await world.client.state()).incarnation
    with pytest.raises(WeightsLost, match="no weights in phase Waiting"):
        await world.client.generate(wanted(incarnation))
    with pytest.raises(WeightsLost, match=r"^refused /confirm: version 3 was not received[^{}]*$"):
        await world.client.confirm(3)
    await world.serve(3)
    with pytest.raises(WeightsLost, match="version 4 is not served: the engine has version 3"):
        await world.client.generate(wanted(incarnation, 4))
    with pytest.raises(WeightsLost, match="not another"):
        await world.client.generate(wanted("another"))
    await world.client.learn(Learn(shapes=SHAPES, dtype="float32"), PATIENCE)
    with pytest.raises(WeightsLost, match="no weights"):
        await world.client.generate(wanted(incarnation))


async def test_a_completion_that_a_sync_overtakes_is_refused(world: World) -> None:
    await world.serve(3)
    world.sampler.go_on.clear()
    asked = asyncio.create_task(
        world.client.generate(wanted((await world.client.state()).incarnation))
    )
    await world.sampler.sampling.wait()
    await world.serve(4)
    world.sampler.go_on.set()
    with pytest.raises(WeightsLost, match="a sync of weights began"):
        await asked


async def test_a_sync_that_fails_leaves_no_weights_and_says_why(world: World) -> None:
    await world.serve(3)
    world.sampler.failure = RuntimeError("a of version 4 did not get there")
    with pytest.raises(EngineFailed, match="500: RuntimeError: a of version 4 did not get there"):
        await world.client.sync(Sync(version=4, meeting={}, names=["a"]), PATIENCE)
    state = await world.client.state()
    assert (state.phase, state.version) == ("Waiting", None)


async def test_only_its_own_attempt_is_answered(world: World) -> None:
    for ask in (world.stranger.state(), world.stranger.confirm(1), world.stranger.end("x", "y")):
        with pytest.raises(EngineFailed, match="403: this engine belongs to attempt uid/1"):
            await ask
    assert not world.server.end_reason.done()
    async with world.session.get(f"{world.base}/healthz") as answer:
        assert answer.status == 200
    with pytest.raises(WeightsLost, match="not another"):
        await world.client.end("given up", "another")
    assert not world.server.end_reason.done()
    await world.client.end("given up", (await world.client.state()).incarnation)
    assert world.server.end_reason.result() == "given up"


async def test_what_nobody_learnt_or_vllm_does_not_know_is_no_failure_of_the_engine(
    world: World,
) -> None:
    await world.serve(3)
    with pytest.raises(RequestRejected, match="1 tensors were never learnt, the first is c"):
        await world.client.sync(Sync(version=4, meeting={}, names=["c"]), PATIENCE)
    with pytest.raises(RequestRejected, match="no such setting"):
        await world.client.generate(wanted((await world.client.state()).incarnation, bad=1))


async def test_an_answer_of_vllm_that_can_not_be_right_is_a_failure_of_this_engine_alone(
    world: World,
) -> None:
    await world.serve(3)
    incarnation = (await world.client.state()).incarnation
    with pytest.raises(EngineFailed, match="500: ValidationError: 1 validation error"):
        await world.client.generate(wanted(incarnation, answered_with=[-1]))
    with pytest.raises(EngineFailed, match=r"500: ValueError: zip\(\) argument 2"):
        await world.client.generate(wanted(incarnation, answered_with="nonsense"))


@pytest.mark.parametrize("path", ["/learn", "/sync", "/prove", "/confirm", "/generate", "/end"])
async def test_any_other_body_is_refused(world: World, path: str) -> None:
    for body in (b"", b"[]", b"{}", b"\xff", b'{"version": -1}', b'{"version": 1e400}'):
        async with world.session.post(
            world.base + path, data=body, headers={ATTEMPT_HEADER: ATTEMPT}
        ) as answer:
            assert answer.status == 400, (path, body)


async def asked_at(port: int, seconds: float) -> EngineUnreachable:
    """How a sync ends at a port where no engine answers."""
    async with ClientSession() as session:
        with pytest.raises(EngineUnreachable) as ended:
            await EngineClient(session, "127.0.0.1", port, ATTEMPT).sync(
                Sync(version=1, meeting={}, names=["a"]), seconds
            )
    return ended.value


def test_an_engine_that_is_not_there_is_told_from_one_that_is_late() -> None:
    async def say_nothing(*_: object) -> None:
        await asyncio.Event().wait()

    async def asked_in_vain() -> EngineUnreachable:
        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        try:
            return await asked_at(silent.sockets[0].getsockname()[1], 600.0)
        finally:
            silent.close()

    assert asyncio.run(asked_at(1, PATIENCE)).is_gone
    assert not virtually(asked_in_vain()).is_gone


class NoAnswer(TCPConnector):
    """Connections that nobody accepts or refuses, as behind a NetworkPolicy."""

    async def _create_connection(self, *_: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("seconds", [600.0, None])
def test_a_connection_that_nobody_takes_is_told_with_its_own_time(seconds: float | None) -> None:
    async def asked() -> None:
        async with ClientSession(connector=NoAnswer()) as session:
            client = EngineClient(session, "engine-0", 8000, ATTEMPT)
            await client.sync(Sync(version=1, meeting={}, names=["a"]), seconds)

    words = (
        r"took no connection for /sync at http://engine-0:8000 within 5 s; check whether its pod"
    )
    with pytest.raises(EngineUnreachable, match=words) as ended:
        virtually(asked())
    assert not ended.value.is_gone


LIES = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda version, incarnation, count, scores: (
            GeneratedCompletions(
                version=version,
                incarnation=incarnation,
                completions=[Completion(tokens=[1], logprobs=[-1.0] * scores)] * count,
            )
            .model_dump_json()
            .encode()
        ),
        st.integers(0, 9),
        st.sampled_from(["me", "you"]),
        st.integers(0, 3),
        st.integers(0, 2),
    ),
)


@settings(deadline=None)
@given(LIES)
def test_no_wrong_answer_passes_for_completions(answer: bytes) -> None:
    class Lying(EngineClient):
        async def _ask(self, *_: Any) -> bytes:
            return answer

    asked = wanted("me")
    try:
        taken = asyncio.run(Lying(None, "host", 1, ATTEMPT).generate(asked))  # type: ignore[arg-type]
    except EngineFailed:
        return
    assert (taken.version, taken.incarnation) == (asked.version, asked.incarnation)
    assert [len(one.logprobs) for one in taken.completions] == [1, 1]


def test_states_are_bounded() -> None:
    with pytest.raises(ValidationError):
        EngineState(incarnation="x" * 65, phase="Waiting")
