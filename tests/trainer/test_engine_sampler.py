"""What an engine pod makes of vLLM's answers and refusals.

vLLM is played: the classes have the bases of its version 0.30, in which no refusal is a ValueError.
"""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpo_trainer.engine_pod.messages import Generate, RequestInvalid
from tests.virtual_time import virtually


class VLLMClientError(Exception):
    """What vLLM blames on a request."""


class EngineGenerateError(Exception):
    """What vLLM makes of any other error."""


class SamplingParams:
    """Parameters of one completion."""

    def __init__(self, *, seed: int, output_kind: str, temperature: float = 1.0) -> None:
        assert (seed, output_kind) == (5, "final")
        if temperature < 0:
            raise VLLMClientError("temperature must be non-negative, got -1.0.")


class FakeEngine:
    """AsyncLLM with one answer, or an error, for every request."""

    def __init__(self, output: Any = None, error: Exception | None = None) -> None:
        self.output = output
        self.error = error

        self.mode = "raw_logprobs"
        self.modes: list[str] = []
        """Those in which it has sampled."""

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        self.modes.append(self.mode)
        await asyncio.sleep(1)
        self.modes.append(self.mode)
        if self.error is not None:
            raise self.error
        yield SimpleNamespace(outputs=[self.output])

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[None]:
        assert method == "logprobs_switch"
        (self.mode,) = args
        return [None]


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, on the played vLLM."""
    kinds = SimpleNamespace(FINAL_ONLY="final")
    for played in (
        module("vllm", SamplingParams=SamplingParams),
        module("vllm.engine.arg_utils", AsyncEngineArgs=dict),
        module("vllm.exceptions", VLLMClientError=VLLMClientError),
        module("vllm.inputs", TokensPrompt=dict),
        module("vllm.sampling_params", RequestOutputKind=kinds),
        module("vllm.v1.engine.async_llm", AsyncLLM=FakeEngine),
        module("vllm.v1.metrics.loggers", StatLoggerBase=object),
    ):
        monkeypatch.setitem(sys.modules, played.__name__, played)
    name = "grpo_trainer.engine_pod.sampler"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def sampled(sampler: Any, engine: FakeEngine, **sampling: Any) -> Any:
    """The completions of one prompt by that engine."""
    return virtually(made(sampler, engine).sample(wanted(sampling)))


def made(sampler: Any, engine: FakeEngine) -> Any:
    """A sampler of that engine, whose log-probabilities are raw."""
    new = sampler.Sampler.__new__(sampler.Sampler)
    new._engine, new._usual_mode, new._other_mode = engine, engine.mode, asyncio.Lock()
    return new


def wanted(sampling: dict[str, Any], **more: Any) -> Generate:
    return Generate(version=1, incarnation="a", prompt=[1], seeds=[5], sampling=sampling, **more)


def test_log_probabilities_after_the_sampler_are_those_of_one_request(sampler: Any) -> None:
    engine = FakeEngine(output([7], "stop"))
    canary, completions = wanted({}, after_sampler=True), wanted({})

    async def sample() -> None:
        samples = made(sampler, engine).sample
        await asyncio.gather(samples(canary), samples(canary))
        await samples(completions)

    virtually(sample())
    assert engine.modes == ["processed_logprobs"] * 4 + ["raw_logprobs"] * 2


def test_a_failed_canary_leaves_the_engine_as_it_was(sampler: Any) -> None:
    engine = FakeEngine(error=EngineGenerateError("list index out of range"))
    with pytest.raises(EngineGenerateError):
        virtually(made(sampler, engine).sample(wanted({}, after_sampler=True)))
    assert (engine.modes[-1], engine.mode) == ("processed_logprobs", "raw_logprobs")


def output(tokens: list[int], reason: str, scored: int | None = None) -> Any:
    """vLLM's answer, with log-probabilities of so many of its tokens, by default of all."""
    steps = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens[:scored]]
    return SimpleNamespace(token_ids=tokens, logprobs=steps, finish_reason=reason)


@pytest.mark.parametrize("reason", ["stop", "length", "repetition"])
def test_a_whole_completion_is_answered(sampler: Any, reason: str) -> None:
    (completion,) = sampled(sampler, FakeEngine(output([7, 8], reason)))
    assert (completion.tokens, completion.logprobs) == ([7, 8], [-0.5, -0.5])


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"temperature": -1.0}, None),
        ({"bogus": 1}, None),
        ({}, VLLMClientError("The decoder prompt (length 9) is longer than the maximum")),
    ],
)
def test_a_request_that_vllm_refuses_is_the_requests_fault(
    sampler: Any, sampling: dict[str, Any], error: Exception | None
) -> None:
    with pytest.raises(RequestInvalid, match=r"non-negative|bogus|longer than the maximum"):
        sampled(sampler, FakeEngine(output([7], "stop"), error), **sampling)


@pytest.mark.parametrize(
    "engine",
    [
        FakeEngine(output([7, 8], "abort")),
        FakeEngine(output([], "error")),
        FakeEngine(output([7, 8], "length", scored=1)),
        FakeEngine(error=EngineGenerateError("list index out of range")),
    ],
    ids=["aborted", "an internal error", "scores are missing", "it raises"],
)
def test_a_completion_that_is_not_whole_is_the_engines_fault(
    sampler: Any, engine: FakeEngine
) -> None:
    with pytest.raises(Exception) as ended:  # noqa: PT011 - of any kind but one
        sampled(sampler, engine)
    assert not isinstance(ended.value, RequestInvalid)
