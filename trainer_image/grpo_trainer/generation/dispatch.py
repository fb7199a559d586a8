"""Runs one generation over several engines: which engine gets which prompt, and where it goes when
an engine fails.

Every engine holds a few prompts at a time and gets the next when it has answered one, so that a
fast engine does more. What a lost engine held is sampled again elsewhere, by the same seeds. So is
what it had answered, unless the engine was proven once more since. PromptAssignment holds these
rules alone; CompletionDispatch sends prompts and receives completions.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_api.report.training_metrics import ENGINE_TOKENS

from ..engine_pod.messages import MAX_BODY, TOKEN_BYTES, Generate, GeneratedCompletions
from ..runtime.errors import EngineLost, TrainingError
from .engine_client import EngineFailed, RequestRejected, WeightsLost
from .fleet import Engine, engines_message
from .generation_base import Sample


class PromptAssignment:
    """The prompts of one generation on their way."""

    def __init__(self, prompts: Iterable[int], capacity: int) -> None:
        """`capacity` is the number of prompts that an engine holds at a time, at least 1."""
        self._waiting = deque(prompts)
        self._capacity = max(1, capacity)
        self._prompts_by_engine: dict[int, set[int]] = {}
        """Prompts by engine."""
        self._unproven_by_engine: dict[int, set[int]] = {}
        """Answered prompts by engine, as long as it was not proven again."""

    @property
    def is_done(self) -> bool:
        """True if every prompt has been answered."""
        return not self._waiting and not any(self._prompts_by_engine.values())

    @property
    def prompts_by_engine(self) -> Mapping[int, set[int]]:
        """The prompts that each engine holds."""
        return self._prompts_by_engine

    @property
    def unproven_engines(self) -> list[int]:
        """The engines that have answered prompts and were not proven since."""
        return [engine for engine, prompts in self._unproven_by_engine.items() if prompts]

    def assign(self, engines: Iterable[int]) -> list[tuple[int, int]]:
        """Engines with their next prompts: always the engine that holds the fewest, of several the
        first."""
        live = list(engines)
        assignments = []
        while self._waiting and live:
            engine = min(
                live,
                key=lambda candidate: (len(self._prompts_by_engine.get(candidate, ())), candidate),
            )
            prompts = self._prompts_by_engine.setdefault(engine, set())
            # The engine with the fewest prompts is full, so all are.
            if len(prompts) >= self._capacity:
                break
            prompt = self._waiting.popleft()
            prompts.add(prompt)
            assignments.append((engine, prompt))
        return assignments

    def record_answer(self, engine: int, prompt: int) -> None:
        """An engine has completed a prompt."""
        self._prompts_by_engine[engine].remove(prompt)
        self._unproven_by_engine.setdefault(engine, set()).add(prompt)

    def record_proof(self, engine: int) -> None:
        """Record that an engine's weights were verified again: its answers are valid."""
        self._unproven_by_engine.pop(engine, None)

    def take_back(self, engine: int) -> list[int]:
        """An engine is lost: its prompts wait again, before all others; returns them."""
        prompts = sorted(
            self._prompts_by_engine.pop(engine, set()) | self._unproven_by_engine.pop(engine, set())
        )
        self._waiting.extendleft(reversed(prompts))
        return prompts


def prompts_per_engine(max_sequences: int, completions: int) -> int:
    """Prompts that fill an engine twice: a slot that a short completion leaves is taken by the next
    prompt at once."""
    return 2 * -(-max_sequences // max(1, completions))


def completions_per_request(max_sequences: int, max_tokens: int) -> int:
    """Most completions, of at most `max_tokens` tokens, that one engine is asked for at once: as
    many as it samples at a time, and no more than an answer holds."""
    # One token more for what is around a completion's tokens.
    return max(1, min(max_sequences, MAX_BODY // (TOKEN_BYTES * (max_tokens + 1))))


TICK_SECONDS = 1.0
MOST_FLEETS = 3
"""How often one generation may lose all engines: a prompt that ends each would do so for ever."""
Prove = Callable[[Engine], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A prompt with its completions' seeds: what one request is for."""

    prompt: list[int]
    seeds: list[int]


class CompletionDispatch:
    """The completions of one generation, as far as they are there."""

    def __init__(
        self,
        engines: Sequence[Engine],
        prove: Prove,
        requests: Sequence[CompletionRequest],
        sampling: Mapping[str, Any],
        *,
        max_sequences: int,
        stall_seconds: float,
        after_sampler: bool = False,
    ) -> None:
        """`prove` raises EngineFailed where an engine has no longer the weights that it was proven
        to have. `sampling` is that of every completion, `max_sequences` how many an engine samples
        at a time. After `stall_seconds` without a token an engine that holds prompts is lost.
        `after_sampler`: see Generate."""
        self._engines = {engine.view.index: engine for engine in engines}
        self._pieces = requests
        self._prove = prove
        self._sampling = dict(sampling)
        self._after_sampler = after_sampler
        self._stall = stall_seconds
        most = max(len(request.seeds) for request in requests)
        self._capacity = prompts_per_engine(max_sequences, most)
        self._version: int | None = None
        self._assignment = PromptAssignment((), self._capacity)
        self._samples: dict[int, list[Sample]] = {}
        self._tasks: dict[asyncio.Task[GeneratedCompletions], tuple[int, int]] = {}
        self._begun: dict[int, float] = {}
        """When each engine was last given a prompt or answered one, by the time of the event
        loop."""
        self._tokens: dict[int, int] = {}
        self._seconds = 0.0
        self._lost_fleets = 0

    @property
    def samples(self) -> list[Sample]:
        """All completions in the order of the pieces and of their seeds, once they are complete."""
        return [sample for index in range(len(self._pieces)) for sample in self._samples[index]]

    def metrics(self) -> dict[str, float]:
        """Tokens per second of each engine that sampled any; none before the end."""
        if not self._seconds:
            return {}
        return {
            f"{ENGINE_TOKENS.key}/{index}": count / self._seconds
            for index, count in self._tokens.items()
        }

    async def sample_remaining(self, version: int) -> bool:
        """Sample what is still wanted under this version; False where no engine is left that has
        it.

        Raises:
            TrainingError: the engines don't take a prompt.
            EngineLost: all engines were lost MOST_FLEETS times.
        """
        begun = asyncio.get_running_loop().time()
        # A generation is of one version: what was answered under an earlier one is wanted again.
        if version != self._version:
            self._version = version
            self._assignment = PromptAssignment(range(len(self._pieces)), self._capacity)
        try:
            while not (self._assignment.is_done and await self._settle_engines()):
                engines = self._engines.items()
                live = [index for index, engine in engines if engine.view.is_serving(version)]
                # What a lost engine has answered in this generation is wanted again too: it was not
                # proven afterwards.
                concerned = set(self._assignment.prompts_by_engine)
                concerned |= set(self._assignment.unproven_engines)
                self._drop(concerned - set(live))
                if not live:
                    self._record_lost_fleet()
                    return False
                await self._advance(live, version)
            return True
        finally:
            # After an exception the answers of open requests are not taken.
            self._drop(set(self._assignment.prompts_by_engine))
            self._seconds += asyncio.get_running_loop().time() - begun

    def _record_lost_fleet(self) -> None:
        self._lost_fleets += 1
        if self._lost_fleets == MOST_FLEETS:
            views = (engine.view for engine in self._engines.values())
            raise EngineLost(
                f"one generation has lost all engines {MOST_FLEETS} times, maybe by one of its "
                f"prompts: {engines_message(views)}"
            )

    async def _advance(self, live: list[int], version: int) -> None:
        """Hand out what engines have room for, and wait for an answer or a moment."""
        self._hand_out(live, version)
        if self._tasks:
            # At most for a tick, so that a lost or stalled engine is noticed while the others
            # sample.
            finished_tasks, _ = await asyncio.wait(
                self._tasks, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in finished_tasks:
                self._take(task)
        self._lose_stalled(version)

    async def _settle_engines(self) -> bool:
        """True if every engine that has answered is proven once more; what others have answered is
        wanted again."""
        await asyncio.gather(*(self._settle(index) for index in self._assignment.unproven_engines))
        return self._assignment.is_done

    async def _settle(self, index: int) -> None:
        engine = self._engines[index]
        process = engine.view.process
        try:
            await self._prove(engine)
        # The process that is there now may be another, which has failed nothing.
        except WeightsLost as error:
            engine.view.record_lost_weights(f"{error}, after it has sampled")
            self._drop({index})
        except EngineFailed as error:
            engine.record_failure(error, process, ", after it has sampled")
            self._drop({index})
        else:
            self._assignment.record_proof(index)

    def _hand_out(self, live: list[int], version: int) -> None:
        for index, number in self._assignment.assign(live):
            engine, piece = self._engines[index], self._pieces[number]
            assert engine.view.incarnation is not None  # it serves
            message = Generate(
                version=version,
                incarnation=engine.view.incarnation,
                prompt=piece.prompt,
                seeds=piece.seeds,
                sampling=self._sampling,
                after_sampler=self._after_sampler,
            )
            self._begun[index] = asyncio.get_running_loop().time()
            self._tasks[asyncio.create_task(engine.client.generate(message))] = (index, number)

    def _take(self, task: "asyncio.Task[GeneratedCompletions]") -> None:
        """One request has come to its end."""
        # The request of an engine that was lost a moment ago has been dropped already.
        if task not in self._tasks:
            return
        index, number = self._tasks.pop(task)
        engine = self._engines[index]
        try:
            answer = task.result()
        # Another engine would refuse the request too, so it is not sampled elsewhere.
        except RequestRejected as error:
            raise TrainingError(f"{engine.view.name} {error}") from error
        except WeightsLost as error:
            engine.view.record_lost_weights(str(error))
            self._drop({index})
            return
        except EngineFailed as error:
            engine.view.record_absence(str(error))
            self._drop({index})
            return
        self._assignment.record_answer(index, number)
        self._begun[index] = asyncio.get_running_loop().time()
        self._samples[number] = [
            Sample(completion.tokens, completion.logprobs, answer.version)
            for completion in answer.completions
        ]
        self._tokens[index] = self._tokens.get(index, 0) + sum(
            len(completion.tokens) for completion in answer.completions
        )

    def _lose_stalled(self, version: int) -> None:
        now = asyncio.get_running_loop().time()
        prompts_by_engine = self._assignment.prompts_by_engine
        for index in [index for index, prompts in prompts_by_engine.items() if prompts]:
            engine = self._engines[index]
            # Another process has come since the prompts were handed out.
            if not engine.view.is_serving(version):
                continue
            # A new prompt restarts the count: an engine without prompts samples nothing and is not
            # stalled.
            if now - max(engine.tokens_changed_at, self._begun[index]) > self._stall:
                silence = f"sampled no token for {self._stall:.0f} s"
                engine.view.give_up(f"{silence}, although it holds prompts")
                self._drop({index})

    def _drop(self, lost: set[int]) -> None:
        """Give up engines that answer no more: their prompts are assigned again."""
        for index in lost:
            self._assignment.take_back(index)
        for task in [task for task, (index, _) in self._tasks.items() if index in lost]:
            del self._tasks[task]
            task.cancel()
            task.add_done_callback(_retrieve_exception)


def _retrieve_exception(task: "asyncio.Task[GeneratedCompletions]") -> None:
    """What became of an abandoned request is of no interest."""
    if not task.cancelled():
        # asyncio logs an exception that is never read.
        task.exception()


def split_requests(wanted: Sequence[tuple[list[int], int]], limit: int) -> list[CompletionRequest]:
    """Group neighbours with the same prompt into pieces, each a request to one engine for at most
    `limit` completions. `wanted` are a prompt and a seed for every completion."""
    pieces: list[CompletionRequest] = []
    for prompt, seed in wanted:
        if pieces and pieces[-1].prompt == prompt and len(pieces[-1].seeds) < limit:
            pieces[-1].seeds.append(seed)
        else:
            pieces.append(CompletionRequest(prompt, [seed]))
    return pieces
