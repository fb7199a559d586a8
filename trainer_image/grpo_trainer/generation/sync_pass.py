"""One pass of the policy's weights over several engines: each gathered tensor goes to all of them,
then each is proven.

Every engine has a lane: a thread with its weight group, its request and its own account of time. A
lane that fails leaves the others alone; one that blocks holds them up for as long as it may take,
once.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from grpo_api.text.clock import Clock

from ..engine_pod.hash_check import differing_names, expected_prints
from ..engine_pod.messages import Sync
from ..engine_pod.transfer import Meeting, TransferFailed, WeightGroup, form_group
from ..engine_pod.weight_layout import Strided
from ..runtime.clock import SYSTEM_CLOCK
from .engine_client import EngineFailed, Prints, WeightsChanged
from .fleet import Engine, Fleet

OTHER_WEIGHTS = "has other weights than it was sent"
MARGIN_SECONDS = 5.0
"""By how much a lane outlives its time whose transfer does not end by itself."""
Sources = Mapping[str, Sequence[Strided | None]]
"""What a worker writes of each tensor, by name."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The hashes that proved an engine, for a comparison later on."""

    version: int
    seed: int
    prints: Prints

    def differing_weights(self, prints: Prints) -> list[str]:
        """Names of the weights that differ.

        Raises:
            EngineFailed: the engine has another number of workers.
        """
        if len(prints) != len(self.prints):
            raise EngineFailed(f"has {len(prints)} workers, where {len(self.prints)} were learnt")
        pairs = zip(self.prints, prints, strict=True)
        return sorted({name for wanted, has in pairs for name in differing_names(wanted, has)})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a pass for one engine."""

    engine: Engine
    incarnation: str
    """The process that the pass was for."""
    problem: str = ""
    """Why it can't be used; empty where it was proven."""
    differing_weights: Sequence[str] = ()
    """Names of the weights that differ."""
    is_blocked: bool = False
    """Whether its time ran out."""
    is_gone: bool = False
    """Whether its process is gone."""


class Lane:
    """The connection to one engine; its thread does one request at a time."""

    def __init__(self, engine: Engine, incarnation: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.engine = engine
        self._clock = clock
        self.incarnation = incarnation
        self.workers: list[Sources] = []
        """What each worker writes; empty until it has been asked."""
        self._group: WeightGroup | None = None
        self._group_name = ""
        self._thread = ThreadPoolExecutor(1, f"weights-{engine.view.index}")
        self.request: Future[None] | None = None
        self.failure = ""
        self.seconds_left = 0.0
        """Seconds that it may still take in this pass."""
        self.pending: Future[None] | None = None
        self.proof: Proof | None = None
        """What the engine was last proven by."""

    def begin(self, meeting: Meeting, request: "Future[None]") -> None:
        """Begin a pass: meet the engine, which has been asked to come, unless the group still
        exists."""
        self.failure, self.seconds_left, self.request = "", meeting.seconds, request
        self.pending = self._thread.submit(self._meet, meeting)

    def send(self, tensor: torch.Tensor, what: str) -> None:
        """Send a tensor, contiguous and in the engine's dtype.

        `pending` is done when the engine has taken it, or the lane has failed.
        """
        if not self.failure:
            self.pending = self._thread.submit(self._send, tensor, what)

    def await_sent(self, deadline: float, what: str) -> None:
        """Wait until `pending` is done, or fail the lane: NCCL makes a communicator when the first
        tensor is sent, and waits without a limit for an engine that has died or can't be reached.

        `deadline` is a time of the system's clock.
        """
        if self.failure or self.pending is None:
            return
        try:
            self.pending.result(max(0.0, deadline - SYSTEM_CLOCK.now()))
        except TimeoutError:
            self.failure = (
                f"did not take {what} in its time, and rank 0 still waits for it: its process has "
                "died, or NCCL can't connect the two pods. Does a NetworkPolicy allow all ports "
                "between them, and is NCCL_SOCKET_IFNAME their interface?"
            )
            self.seconds_left = 0.0

    def group_name(self) -> str:
        """Name of the weight group: unchanged until a new group has to be formed."""
        if self._group is None:
            # A process that comes back after another has a new lane, and the store has the keys of
            # its earlier groups.
            self._group_name = f"{self.incarnation}/{uuid.uuid4().hex}"
        return self._group_name

    def leave(self) -> None:
        """Leave the weight group, which can no longer be used."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def close(self) -> None:
        """Have the thread leave the group and end: NCCL's abort may block for ever."""
        self._thread.submit(self.leave)
        self._thread.shutdown(wait=False)

    def _meet(self, meeting: Meeting) -> None:
        if self._group is None:
            self._run_transfer(
                lambda: setattr(
                    self, "_group", form_group(meeting, self._has_answered, self._clock)
                )
            )

    def _has_answered(self) -> bool:
        """True if the engine has answered already, which it does before its end only where it
        fails."""
        return self.request is not None and self.request.done()

    def _send(self, tensor: torch.Tensor, what: str) -> None:
        group = self._group
        if group is None or self.failure:
            return

        def broadcast() -> None:
            if tensor.is_cuda:
                # The current device belongs to a thread, and a lane's thread begins with device 0.
                torch.cuda.set_device(tensor.device)
            group.broadcast(tensor, what, self.seconds_left)

        self._run_transfer(broadcast)

    def _run_transfer(self, action: Any) -> None:
        begun = self._clock.now()
        try:
            action()
        except TransferFailed as error:
            self.failure = str(error)
        # Of any kind: what this thread raises is read nowhere, and the engine would wait in vain.
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            # Only transfers use up the lane's time, not the gathering of tensors between them.
            self.seconds_left -= self._clock.now() - begun


class SyncPass:
    """All lanes of one pass, on rank 0."""

    def __init__(self, fleet: Fleet, lanes: Sequence[Lane], version: int, seed: int) -> None:
        """`seed` of the hashes."""
        self._fleet = fleet
        self.lanes = lanes
        self.version = version
        self._seed = seed
        self._expected: list[tuple[list[Sources], Prints]] = []
        """What the hashes must be, by layout: engines of one attempt mostly have the same."""
        self.proof_seconds = 0.0

    def begin(self, meetings: Sequence[Meeting], names: list[str]) -> None:
        """Ask every lane's engine to come."""
        for lane, meeting in zip(self.lanes, meetings, strict=True):
            lane.engine.is_syncing = True
            message = Sync(version=self.version, meeting=asdict(meeting), names=names)
            # beyond the lane's own time, which is the one that counts while tensors are on their
            # way
            request = self._fleet.start(lane.engine.client.sync(message, None))
            lane.begin(meeting, request)
            if all(lane.workers != workers for workers, _ in self._expected):
                self._expected.append((lane.workers, [{} for _ in lane.workers]))

    def send(self, name: str, tensor: torch.Tensor) -> None:
        """Send one tensor, contiguous and in the engines' dtype, to all, and hash it meanwhile."""
        what, sent_at = f"{name} of version {self.version}", SYSTEM_CLOCK.now()
        deadlines = [sent_at + lane.seconds_left + MARGIN_SECONDS for lane in self.lanes]
        for lane in self.lanes:
            lane.send(tensor, what)
        begun = time.perf_counter()
        # Hashed while the lanes send. The tensor is good only until the next one, so both must end
        # before it.
        for workers, prints in self._expected:
            for sources, expected in zip(workers, prints, strict=True):
                expected[name] = expected_prints(tensor, sources[name], self._seed)
        self.proof_seconds += time.perf_counter() - begun
        for lane, deadline in zip(self.lanes, deadlines, strict=True):
            lane.await_sent(deadline, what)

    def finish(self) -> list[Verdict]:
        """Wait until every engine has all, prove each, and have those serve that are proven."""
        return self._fleet.call(self._finish())

    async def _finish(self) -> list[Verdict]:
        return list(await asyncio.gather(*(self._verdict(lane) for lane in self.lanes)))

    async def _verdict(self, lane: Lane) -> Verdict:
        loop = asyncio.get_running_loop()
        if lane.failure:
            await _leave(lane)
        begun = loop.time()
        try:
            return await self._prove_weights(lane)
        except (EngineFailed, TimeoutError) as error:
            blocked = lane.seconds_left - (loop.time() - begun) <= 0.0
            await _leave(lane)
            problem = (
                str(error) or f"did not take version {self.version} within the time that it has"
            )
            return Verdict(
                lane.engine,
                lane.incarnation,
                problem,
                is_blocked=blocked,
                is_gone=isinstance(error, EngineFailed) and error.is_gone,
            )
        finally:
            lane.engine.is_syncing = False

    async def _prove_weights(self, lane: Lane) -> Verdict:
        client, view = lane.engine.client, lane.engine.view
        # At least a moment: an answer that is already there counts although the time is up.
        async with asyncio.timeout(max(lane.seconds_left, 0.1)):
            await self._await_answer(lane)
            begun = time.perf_counter()
            proof = self._proof(lane)
            wrong = proof.differing_weights(await client.prints(self.version, self._seed, None))
            self.proof_seconds += time.perf_counter() - begun
            if wrong:
                return Verdict(
                    lane.engine, lane.incarnation, f"{OTHER_WEIGHTS}: {', '.join(wrong[:3])}", wrong
                )
            await client.confirm(self.version)
        # The fleet's watch may have seen another process meanwhile, which has none of these
        # weights.
        if view.incarnation != lane.incarnation:
            return Verdict(lane.engine, lane.incarnation, "restarted during the sync")
        lane.proof = proof
        view.record_proof(self.version)
        return Verdict(lane.engine, lane.incarnation)

    async def _await_answer(self, lane: Lane) -> None:
        """The engine's own answer, which says more than the group's error where there are both."""
        assert lane.request is not None
        if lane.failure and not lane.request.done():
            lane.request.cancel()
            raise EngineFailed(lane.failure)
        try:
            await asyncio.wrap_future(lane.request)
        except EngineFailed as error:
            if lane.failure:
                error.args = (f"{error}; {lane.failure}",)
            raise

    def _proof(self, lane: Lane) -> Proof:
        prints = next(prints for workers, prints in self._expected if workers == lane.workers)
        return Proof(self.version, self._seed, prints)


async def _leave(lane: Lane) -> None:
    """Have a lane leave its group, and wait a moment for it: NCCL's abort may block for ever
    (ProcessGroupNCCL.cpp), and this thread looks after all engines."""
    leaving = asyncio.create_task(asyncio.to_thread(lane.leave))
    await asyncio.wait([leaving], timeout=MARGIN_SECONDS)


async def prove_again(lane: Lane, seconds: float) -> None:
    """Make sure that an engine still has what it was proven to have.

    Raises:
        WeightsChanged: it has not.
        EngineFailed: it doesn't say so, or not in time.
    """
    assert lane.proof is not None  # it has served
    proof = lane.proof
    if wrong := proof.differing_weights(
        await lane.engine.client.prints(proof.version, proof.seed, seconds)
    ):
        raise WeightsChanged(f"{OTHER_WEIGHTS}: {', '.join(wrong[:3])}")
