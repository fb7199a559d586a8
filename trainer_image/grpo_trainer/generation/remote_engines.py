"""vLLM engines in pods of their own: rank 0 brings them the weights, proves them and splits the
prompts over them.

A dead engine's pod is replaced by its Job. Here it is used again once it has come back and was
proven to have the present weights. As long as one engine is left, the run goes on with it.

Every call ends within a time of its own. Which engine is used for what follows from fleet.py and
dispatch.py.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from grpo_api.plan.hang_timeouts import hang_timeout_seconds

from ..engine_pod.hash_check import config_fingerprint, new_seed
from ..engine_pod.messages import Learn, attempt_of
from ..engine_pod.transfer import Meeting, open_store
from ..gang import ranks
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import EngineLost, RendezvousTimeout, WeightSyncTimeout
from .colocated import unprovable_error
from .dispatch import CompletionDispatch, completions_per_request, split_requests
from .engine_client import EngineFailed, WeightsChanged, WeightsLost
from .fleet import Engine, Fleet
from .generation_base import EngineGeneration, EngineSetup, Sample
from .merged_weights import weight_shapes
from .sync_pass import Lane, Sources, SyncPass, Verdict, prove_again

log = logging.getLogger(__name__)

SHARE_OF_PATIENCE = 0.5
"""Longest wait for an engine as a share of the watchdog's patience, so that it is not the watchdog
who ends the run."""


class EnginesMain:
    """Rank 0's part of the work with engines: no other rank talks to them."""

    def __init__(self, setup: EngineSetup, model: nn.Module) -> None:
        plan = setup.plan
        assert plan.engines is not None
        self._setup = setup
        self._addresses = plan.engines
        self._shapes = {name: list(shape) for name, shape in weight_shapes(model).items()}
        self._config = config_fingerprint(setup.folder)
        # A wait for engines must end with its own error before the watchdog calls it a hang.
        self._limit = min(
            float(plan.guard.weight_sync_timeout_seconds),
            SHARE_OF_PATIENCE * hang_timeout_seconds("Training", plan.guard, plan.execution),
        )
        self._store = open_store(plan.rendezvous.address, plan.engines.weights_port)
        self._fleet = Fleet(plan.engines, attempt_of(plan.job))
        self._lanes: dict[str, Lane] = {}
        """By incarnation."""
        self._completing: CompletionDispatch | None = None
        self.sync_pass: SyncPass | None = None
        self._proof = 0.0
        self._failures = 0

    def await_engines(self) -> None:
        """Wait until all engines are usable, or for the time limit if some are by then.

        Raises:
            RendezvousTimeout: none is.
        """
        seconds = float(self._setup.plan.guard.rendezvous_timeout_seconds)
        if self._fleet.call(self._fleet.await_engines(len(self._addresses.hosts), seconds)):
            return
        if not self._fleet.usable_engines():
            raise RendezvousTimeout(
                f"no engine came within guard.rendezvousTimeoutSeconds = {seconds:.0f}: "
                f"{self._fleet.engines_message()}. Do their pods run, and does a NetworkPolicy "
                f"allow port {self._addresses.port} between the job's pods?"
            )
        # Those that come later join at the next sync.
        log.warning(f"begins without some engines: {self._fleet.engines_message()}")

    def begin_sync(self, version: int, began_at: float) -> bool:
        """Start to send `version` to the usable engines that lack it; return False if none of them
        lacks it, or others have it at the limit for the sync, which counts from `began_at`, a time
        of the clock.

        Raises:
            WeightSyncTimeout: no engine took it within the limit.
        """
        # Processes that come during one pass after another must not keep all ranks here for good.
        is_late = SYSTEM_CLOCK.now() >= began_at + self._limit
        # The Job of a lost engine replaces its pod, so one may come back within the limit.
        while is_late or not (lanes := self._prepared_lanes(version)):
            if any(engine.view.is_serving(version) for engine in self._fleet.engines):
                return False
            seconds_left = max(0.0, began_at + self._limit - SYSTEM_CLOCK.now())
            if is_late or not self._await_one(seconds_left):
                raise WeightSyncTimeout(
                    self._no_engine_message(f"took version {version} of the weights")
                )
        # The seed is new for every pass, also for another pass with the same version: no earlier
        # answer can pass.
        self.sync_pass = SyncPass(self._fleet, lanes, version, new_seed())
        self.sync_pass.begin([self._meeting(lane) for lane in lanes], list(self._shapes))
        return True

    def finish_sync(self) -> list[str]:
        """Prove the engines of the pass; the names that differ, where no engine at all could be
        proven for it."""
        assert self.sync_pass is not None
        verdicts = self.sync_pass.finish()
        self._proof += self.sync_pass.proof_seconds
        for verdict in verdicts:
            self._record_verdict(verdict)
        # One proven engine is enough to go on. The others are sent the weights again at the next
        # sync.
        if any(engine.view.is_serving(self.sync_pass.version) for engine in self._fleet.engines):
            self._failures += sum(bool(verdict.differing_weights) for verdict in verdicts)
            return []
        return sorted({name for verdict in verdicts for name in verdict.differing_weights})

    def take_failures(self) -> int:
        """Proofs that failed, beside those that failed for all engines, since the last call."""
        failures, self._failures = self._failures, 0
        return failures

    def take_sync_seconds(self, total: float) -> tuple[float, float]:
        """Time of a sync without its proof, and of the proof."""
        proof, self._proof = self._proof, 0.0
        return max(0.0, total - proof), proof

    def begin_generation(
        self,
        wanted: list[tuple[list[int], int]],
        sampling: dict[str, Any],
        *,
        after_sampler: bool = False,
    ) -> None:
        """Begin a generation: a prompt and a seed for every completion."""
        sequences = self._setup.engine.max_sequences
        limit = completions_per_request(sequences, sampling["max_tokens"])
        self._completing = CompletionDispatch(
            self._fleet.engines, self._prove_again, split_requests(wanted, limit), sampling,
            max_sequences=sequences, stall_seconds=self._limit, after_sampler=after_sampler,
        )  # fmt: skip

    async def _prove_again(self, engine: Engine) -> None:
        incarnation = engine.view.incarnation
        if incarnation is None or incarnation not in self._lanes:
            raise WeightsLost("is no longer the process that has sampled")
        try:
            await prove_again(self._lanes[incarnation], self._limit)
        except WeightsChanged:
            self._failures += 1
            raise

    def continue_generation(self, version: int | None) -> bool:
        """Continue the generation; return False if no engine is left that has the weights."""
        assert self._completing is not None
        assert version is not None
        return self._fleet.call(self._completing.sample_remaining(version))

    def samples(self) -> list[Sample]:
        """All completions of the generation."""
        assert self._completing is not None
        return self._completing.samples

    def await_engine(self) -> None:
        """Wait until an engine can be sent the weights.

        Raises:
            EngineLost: none comes.
        """
        if not self._await_one(self._limit):
            raise EngineLost(self._no_engine_message("was left to sample from"))

    def _await_one(self, seconds: float) -> bool:
        """Wait for an engine that can be sent weights; return False if none comes."""
        self._setup.record_wait(f"none can be used: {self._fleet.engines_message()}")
        try:
            return self._fleet.call(self._fleet.await_engines(1, seconds))
        finally:
            self._setup.record_wait("")

    def close(self) -> None:
        """Close the connections to the engines."""
        for lane in self._lanes.values():
            lane.close()
        self._fleet.close()
        del self._store

    def metrics(self, version: int | None) -> dict[str, float]:
        """Metrics of all engines, by key."""
        rates = self._completing.metrics() if self._completing else {}
        return {**self._fleet.metrics(version), **rates}

    def _no_engine_message(self, what: str) -> str:
        return (
            f"no engine {what} within {self._limit:.0f} s (guard.weightSyncTimeoutSeconds = "
            f"{self._setup.plan.guard.weight_sync_timeout_seconds}, at most half of the time that "
            f"a step may take): rank 0 at {self._setup.plan.rendezvous.address}; "
            f"{self._fleet.engines_message()}"
        )

    def _prepared_lanes(self, version: int) -> list[Lane]:
        """The lanes of the usable engines that lack `version` and have learnt the layout of the
        weights; new processes learn it now, all at once."""
        lanes: list[Lane] = []
        for engine in self._fleet.usable_engines():
            # Read once: the engines' thread may note at any moment that the process is gone.
            incarnation = engine.view.incarnation
            if incarnation is None or engine.view.is_serving(version):
                continue
            lanes.append(self._lane(engine, incarnation))
        self._fleet.call(self._learn_layouts([lane for lane in lanes if not lane.workers]))
        return [lane for lane in lanes if lane.workers]

    def _lane(self, engine: Engine, incarnation: str) -> Lane:
        if incarnation not in self._lanes:
            # A process that restarted has a new incarnation. The group of its predecessor leads
            # nowhere.
            old_incarnations = [key for key, lane in self._lanes.items() if lane.engine is engine]
            for old_incarnation in old_incarnations:
                self._lanes.pop(old_incarnation).close()
            self._lanes[incarnation] = Lane(engine, incarnation)
        return self._lanes[incarnation]

    async def _learn_layouts(self, lanes: list[Lane]) -> None:
        await asyncio.gather(*map(self._learn_layout, lanes))

    async def _learn_layout(self, lane: Lane) -> None:
        try:
            lane.workers = await self._layouts_of(lane.engine)
        except EngineFailed as error:
            log.warning(f"{lane.engine.view.name}: {error}")
            lane.engine.record_failure(error, lane.incarnation)

    async def _layouts_of(self, engine: Engine) -> list[Sources]:
        dtype = self._setup.plan.execution.compute_dtype
        message = Learn(shapes=self._shapes, dtype=dtype, config=self._config)
        workers = await engine.client.learn(message, self._limit)
        if problems := [problem for _, worker_problems in workers for problem in worker_problems]:
            raise unprovable_error(problems, self._setup.plan.generation)
        # A worker that writes no tensor would be proven by no hash.
        if not workers or any(sources.keys() != self._shapes.keys() for sources, _ in workers):
            raise EngineFailed("has learnt other tensors than rank 0 sends")
        return [sources for sources, _ in workers]

    def _meeting(self, lane: Lane) -> Meeting:
        plan = self._setup.plan
        return Meeting(
            address=plan.rendezvous.address,
            port=self._addresses.weights_port,
            name=lane.group_name(),
            engine=lane.engine.view.name,
            workers=len(lane.workers),
            seconds=self._limit,
            gpu=plan.execution.accelerator == "GPU",
        )

    def _record_verdict(self, verdict: Verdict) -> None:
        """What follows for an engine from a pass."""
        view = verdict.engine.view
        if not verdict.problem:
            return
        log.warning(f"{view.name}: {verdict.problem}")
        # A process that came during the pass was not part of it.
        if verdict.incarnation != view.process:
            return
        # A blocked process would take the whole limit again at the next sync, and all ranks would
        # wait for it.
        if verdict.is_blocked:
            view.give_up(verdict.problem)
        elif verdict.is_gone:
            view.record_absence(verdict.problem)
        else:
            view.record_failure(verdict.problem)


class ServersGeneration(EngineGeneration):
    """The engines of the attempt."""

    def __init__(self, setup: EngineSetup, model: nn.Module, stop_tokens: list[int]) -> None:
        """Wait for the engines. A collective.

        Raises:
            RendezvousTimeout: none came within guard.rendezvousTimeoutSeconds.
            EngineUnprovable: this model's weights in an engine can't be proven; BadInput where
                Transformers may not sample instead.
        """
        super().__init__(setup, model, stop_tokens)
        self._main = EnginesMain(setup, model) if ranks.rank() == 0 else None
        self._run_on_main(lambda main: main.await_engines())

    def attempt_sync(self, version: int) -> Sequence[str]:
        """Bring the weights to every engine that has not this version; those that differ once more,
        if others have it.

        Raises:
            WeightSyncTimeout: no engine took them in guard.weightSyncTimeoutSeconds.
        """
        wrong: list[str] = []
        began = SYSTEM_CLOCK.now()
        # Engines that came during a pass get a pass of their own, until none lacks this version.
        while self._run_on_main(lambda main: main.begin_sync(version, began)):
            sending = self._main.sync_pass if self._main else None
            # On every rank: under ZeRO-3 each tensor is gathered from all of them.
            for name, tensor in self.weights():
                if sending:
                    sending.send(name, tensor)
            wrong = self._run_on_main(lambda main: main.finish_sync())
            if wrong:
                break
        if self._main:
            self.record_seconds(*self._main.take_sync_seconds(SYSTEM_CLOCK.now() - began))
        return wrong

    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        arguments: dict[str, Any],
        *,
        after_sampler: bool = False,
    ) -> list[Sample]:
        """Sample all ranks' prompts on all engines.

        Raises:
            EngineLost: no engine was left, and none came back in guard.weightSyncTimeoutSeconds.
        """
        wanted = ranks.gather(list(zip(prompts, seeds, strict=True)))
        of_all_ranks = [prompt_and_seed for part in wanted for prompt_and_seed in part]
        self._run_on_main(
            lambda main: main.begin_generation(of_all_ranks, arguments, after_sampler=after_sampler)
        )
        while not self._run_on_main(lambda main: main.continue_generation(self.proven_version)):
            self._run_on_main(lambda main: main.await_engine())
            # An engine that comes has random weights, so it is sent the policy's under a new
            # number.
            self.sync_weights()
        if self._main:
            self.failures += self._main.take_failures()
        return self._scatter_samples([len(part) for part in wanted])

    def changed_weights(self) -> Sequence[str]:
        """None: `sample` has proven every engine once more, and sampled again elsewhere what others
        had."""
        return ()

    def _scatter_samples(self, counts: list[int]) -> list[Sample]:
        """This rank's part of all completions."""
        parts: list[list[Sample]] = []
        if self._main:
            samples, first = self._main.samples(), 0
            for count in counts:
                parts.append(samples[first : first + count])
                first += count
        if ranks.world_size() == 1:
            return parts[0]
        # Rank 0 alone has the completions.
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts or None, src=0)
        mine: list[Sample] = received[0]
        return mine

    def _run_on_main(self, work: Callable[[EnginesMain], Any]) -> Any:
        """What rank 0 does with its engines, while all wait."""

        def on_main() -> Any:
            assert self._main is not None  # this is rank 0
            return work(self._main)

        return ranks.run_on_rank0(on_main, self._record_progress)

    def _record_progress(self) -> None:
        self.setup.record_event()
        if self._main:
            self.setup.record_metrics(self._main.metrics(self.proven_version))
