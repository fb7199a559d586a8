"""What an engine pod makes of vLLM's answers and refusals.

vLLM is played: the classes have the bases of its version 0.30, in which no refusal is a ValueError.
"""

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

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        yield SimpleNamespace(outputs=[self.output])


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
    made = sampler.Sampler.__new__(sampler.Sampler)
    made._engine = engine
    request = Generate(version=1, incarnation="a", prompt=[1], seeds=[5], sampling=sampling)
    return virtually(made.sample(request))


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
