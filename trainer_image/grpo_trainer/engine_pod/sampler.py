"""vLLM's asynchronous engine as an engine pod uses it: the calls of its workers, one prompt's
completions, its load.

The only file of an engine pod that knows vLLM.
"""

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from .messages import Completion, Generate, RequestInvalid
from .vllm_arguments import AFTER_SAMPLER, tokens_and_logprobs


@dataclass(slots=True)
class Load:
    """How much an engine has to do."""

    waiting: int = 0
    cache_used: float = 0.0
    tokens: int = 0


class Sampler:
    """A running engine."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Starts it, which takes as long as vLLM takes to load and profile.

        Raises:
            Exception: whatever vLLM raises at a model or a setting that it can't use.
        """
        self.load = load = Load()
        self._usual_mode: str = settings["logprobs_mode"]
        self._other_mode = asyncio.Lock()
        self.folder = Path(settings["model"])
        """Where its configuration is."""

        class KeepLoad(StatLoggerBase):  # type: ignore[misc]  # vLLM is not followed by the type checker
            """Keeps the newest numbers of vLLM's scheduler."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any
            ) -> None:
                if scheduler_stats is not None:
                    load.waiting = scheduler_stats.num_waiting_reqs
                    load.cache_used = scheduler_stats.kv_cache_usage
                if iteration_stats is not None:
                    load.tokens += iteration_stats.num_generation_tokens

            def log_engine_initialized(self) -> None: ...

        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**settings), stat_loggers=[KeepLoad]
        )

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """A method of every worker; their answers by rank."""
        answers: list[Any] = await self._engine.collective_rpc(method, args=arguments)
        return answers

    async def reset_prefix_cache(self) -> None:
        """Drop what is cached of earlier prompts, which other weights have computed."""
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    async def sample(self, request: Generate) -> list[Completion]:
        """All completions of one prompt.

        Raises:
            RequestInvalid: vLLM doesn't take the prompt or the sampling parameters.
            Exception: whatever vLLM raises; the engine may be dead.
        """
        if not request.after_sampler:
            return await self._sample_completions(request)
        # The mode is the whole engine's. The trainer has these requests alone under way.
        async with self._other_mode:
            await self.call("logprobs_switch", AFTER_SAMPLER)
            try:
                return await self._sample_completions(request)
            finally:
                await self.call("logprobs_switch", self._usual_mode)

    async def _sample_completions(self, request: Generate) -> list[Completion]:
        return list(
            await asyncio.gather(
                *(self._sample_completion(request, seed) for seed in request.seeds)
            )
        )

    async def _sample_completion(self, request: Generate, seed: int) -> Completion:
        prompt = TokensPrompt(prompt_token_ids=request.prompt)
        try:
            parameters = SamplingParams(
                **request.sampling, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY
            )
            answers = [
                answer
                async for answer in self._engine.generate(prompt, parameters, uuid.uuid4().hex)
            ]
        # What vLLM blames on the request is no ValueError (0.30). A parameter that it does not know
        # is a TypeError; one in `generate` comes as its EngineGenerateError.
        except (VLLMClientError, TypeError) as error:
            raise RequestInvalid(str(error)) from error
        tokens, logprobs = tokens_and_logprobs(answers[-1].outputs[0])
        return Completion(tokens=tokens, logprobs=logprobs)

    async def check(self) -> None:
        """Raises vLLM's error where the engine's own process has died."""
        await self._engine.check_health()
