"""A gang of training pods in virtual time: what happens to one of its ranks, and how the others
take it.

The supervisors are real, the ranks' processes and the time are not.
"""

import heapq
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import strategies as st

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Progress, Result, Standstill
from grpo_api.text.contract import TERMINATION_LOG_ENV
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process import supervisor
from grpo_trainer.process.outcome import ProcessEnd, make_outcome
from grpo_trainer.process.supervisor import Worker
from grpo_trainer.process.watchdog import PEER_FAILED, WRITES_STACKS
from grpo_trainer.runtime.errors import BadInput, Diverged, RewardError, classify_error
from tests.stepped_clock import SteppedClock

ATTEMPT = 3
FULL_DISK = "/dev/full"
LOST_PEER = RuntimeError("Connection closed by peer [10.0.0.1]:1")
RAISED: dict[str, Exception] = {
    "a reward fails": RewardError("the service is gone"),
    "the data is wrong": BadInput("spec.dataset.name: no such file"),
    "the loss is infinite": Diverged("the loss of step 3 is inf"),
    "user code raises": ZeroDivisionError("division by zero"),
    "memory runs out": MemoryError(),
}
KILLED = "is killed"
OTHER_CAUSES: dict[str, Result] = {
    KILLED: Result.ERROR,
    "is killed while it writes": Result.ERROR,
    "is killed for memory": Result.OUT_OF_MEMORY,
    "gets a real-time signal": Result.ERROR,
    "exits with 0": Result.ERROR,
    "hangs": Result.HANG,
    "gets SIGTERM": Result.PREEMPTED,
    "is done": Result.SUCCEEDED,
}
STAGES = ("Starting", "Importing", "Connecting", "Proving", "Training", "Saving", "Exporting")
TORN = (b"", b'{"result": "Succ', b"\xff\xfe\x00", b"[]", b'{"result": "Succeeded", "rank": "x"}')


@dataclass(frozen=True)
class Rank:
    """How a rank takes what reaches it."""

    notices: float | None
    """Seconds until it fails because a peer is gone; None: its collective waits for ever."""
    stops: float | None
    """Seconds until it ends when it is told to; None: it is stuck."""
    is_written: bool
    """Whether its termination message can be written."""


@dataclass(frozen=True)
class Story:
    """What happens to a gang."""

    nodes: int
    per_node: int
    ranks: list[Rank]
    cause: str
    culprit: int
    stage: str
    latencies: list[float]
    """Seconds by which the kubelets tell of ends late, by node."""
    torn: bytes
    """What a rank has written that is killed while it writes."""
    has_lost_child: bool
    """Whether the kernel has killed a child of a rank for memory before."""

    @property
    def node(self) -> int:
        """Where the cause is."""
        return self.culprit // self.per_node

    @property
    def is_lost(self) -> bool:
        """Whether the cause's own words are lost."""
        return self.cause in RAISED and not self.ranks[self.culprit].is_written

    @property
    def result(self) -> Result:
        """The result that the cause has."""
        error = RAISED.get(self.cause)
        return classify_error(error)[0] if error else OTHER_CAUSES[self.cause]

    def rank(self, number: int) -> Rank:
        return self.ranks[number]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    culprit = draw(st.integers(0, nodes * per_node - 1))
    ranks = [
        Rank(
            draw(st.none() | st.floats(0.0, 1.5)),
            draw(st.none() | st.floats(0.0, 8.0)),
            draw(st.integers(0, 3)) > 0,
        )
        for _ in range(nodes * per_node)
    ]
    return Story(
        nodes,
        per_node,
        ranks,
        draw(st.sampled_from([*RAISED, *OTHER_CAUSES])),
        culprit,
        draw(st.sampled_from(STAGES)),
        [draw(st.floats(1.0, 2.0)) for _ in range(nodes)],
        draw(st.sampled_from(TORN)),
        has_lost_child=draw(st.booleans()),
    )


class Process:
    """A rank's process as its supervisor sees it."""

    def __init__(self, pod: "Pod", worker_rank: int, message: Path, stacks: Path) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._pod, self._rank, self._message, self._stacks = pod, worker_rank, message, stacks
        self._is_stopping = False
        if pod.story.stage != "Starting":
            stacks.write_text("main 0x0000000000000007\n", encoding="utf-8")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        assert self.returncode is not None, "the supervisor waits for a process that lives"
        return self.returncode

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """What its watchdog, its first handler or nothing does at a signal."""
        stops = self._pod.story.rank(self._rank).stops
        if number == signal.SIGTERM and self._pod.story.stage == "Starting":
            self.end(-signal.SIGTERM)
        elif number == WRITES_STACKS:
            self._stacks.write_text("main 0x07\n", encoding="utf-8")
        elif stops is not None and not self._is_stopping:
            self._is_stopping = True
            seconds = min(stops, 0.5) if number == PEER_FAILED else stops
            self._pod.later(seconds, lambda: self.say(Result.PREEMPTED, "was told to end"))

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._pod.ended.append(self)

    def say(self, result: Result, message: str, **more: Any) -> None:
        """End with an outcome."""
        if self.returncode is None:
            self.end(self._pod.say(self._rank, self._message, result, message, **more))

    def cause(self) -> None:
        """What this story is about happens to this rank."""
        story = self._pod.story
        if story.cause == "is killed while it writes":
            self._message.write_bytes(story.torn)
            self.kill()
        elif story.cause in (KILLED, "is killed for memory"):
            self._pod.oom_kills += story.cause != KILLED
            self.kill()
        elif story.cause == "gets a real-time signal":
            self.end(-signal.SIGRTMIN - 1)
        elif story.cause == "exits with 0":
            self.end(0)
        else:
            self.say(*classify_error(RAISED[story.cause]))


@dataclass
class Pod:
    """One pod of a gang: its supervisor is real, its processes and its time are not."""

    story: Story
    node: int
    plan: TrainingPlan
    folder: Path
    clock: SteppedClock = field(default_factory=SteppedClock)
    ended: list[Process] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    oom_kills: int = 0
    told: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    by_process: dict[Process, Any] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def ranks(self) -> range:
        first = self.node * self.story.per_node
        return range(first, first + self.story.per_node)

    @property
    def message(self) -> Path:
        return self.folder / f"end-{self.node}"

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.told, (self.clock.now() + seconds, next(self.numbers), action))

    def say(self, rank: int, file: Path, result: Result, message: str, **more: Any) -> int:
        """What a rank's process does with its outcome; its exit code."""
        outcome = make_outcome(rank, result, message, Progress(attempt=ATTEMPT, step=7))
        is_written = self.story.rank(rank).is_written
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TERMINATION_LOG_ENV, str(file) if is_written else FULL_DISK)
            end = ProcessEnd(self.plan, lambda _: None)
            return end.finish(outcome.model_copy(update=more))

    def run(self) -> int | None:
        """Run the pod; its exit code, None if it goes on until somebody deletes it."""
        if self.story.per_node == 1:
            return self._run_alone()
        if self._never_ends():
            return None
        place = Placement(self.node, 0, self.story.per_node, self.story.nodes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TERMINATION_LOG_ENV, str(self.message))
            patch.setattr(supervisor, "SYSTEM_CLOCK", self.clock)
            patch.setattr(supervisor, "_start", self._start)
            patch.setattr(supervisor, "oom_kills", lambda: self.oom_kills)
            selectors = SimpleNamespace(DefaultSelector=lambda: Selector(self), EVENT_READ=1)
            patch.setattr(supervisor, "selectors", selectors)
            patch.setattr(os, "pidfd_open", lambda _: os.open(os.devnull, os.O_RDONLY))
            return supervisor.supervise(self.plan, place)

    def _never_ends(self) -> bool:
        """Whether none of its ranks ends by itself."""
        if self.story.cause in ("hangs", "is done"):
            return False
        if self.node == self.story.node:
            stuck = all(self.story.rank(rank).stops is None for rank in self.ranks)
            return self.story.cause == "gets SIGTERM" and stuck and self.story.stage != "Starting"
        return all(self._symptom(rank) is None for rank in self.ranks)

    def _symptom(self, rank: int) -> float | None:
        """Seconds until a rank of another pod than the cause's ends by itself."""
        traits = self.story.rank(rank)
        return traits.stops if self._agrees_to_stop else traits.notices

    @property
    def _agrees_to_stop(self) -> bool:
        return self.story.cause == "gets SIGTERM" and self.story.stage in ("Training", "Saving")

    def _run_alone(self) -> int | None:
        """A pod of one rank has no supervisor."""
        story, rank = self.story, self.ranks[0]
        process = Process(self, rank, self.message, self.folder / f"stacks-{rank}")
        self.processes[rank] = process
        self._schedule()
        if story.cause == "gets SIGTERM" and self.node == story.node:
            self.later(30.0, process.kill)  # the kubelet's
        while self.told and process.returncode is None:
            self.advance(self.told[0][0])
        code = process.returncode
        return code if code is None or code >= 0 else 128 - code

    def _start(self, place: Placement, local_rank: int, folder: Path) -> Worker:
        rank = place.node * place.processes_per_node + local_rank
        message, stacks = folder / f"outcome-{local_rank}", folder / f"stacks-{local_rank}"
        process = Process(self, rank, message, stacks)
        self.processes[rank] = process
        worker = Worker(rank, cast(Any, process), message, stacks)
        self.by_process[process] = worker
        if len(self.processes) == self.story.per_node:
            self._schedule()
        return worker

    def _schedule(self) -> None:
        story = self.story
        is_here = self.node == story.node
        # The kernel counts by container: who it was can't be told of one that is killed alone.
        self.oom_kills += story.has_lost_child and not story.cause.startswith(KILLED)
        if story.cause == "gets SIGTERM" and is_here:
            self.later(0.0, self._get_sigterm)
            # The others' ends may be seen before the own watchdog has heard the signal.
            for rank in self.ranks[1:]:
                if (notices := story.rank(rank).notices) is not None:
                    process = self.processes[rank]
                    self.later(notices, partial(process.say, *classify_error(LOST_PEER)))
            return
        for rank in self.ranks:
            process = self.processes[rank]
            if story.cause == "is done":
                self.later(
                    story.rank(rank).notices or 0.0,
                    partial(process.say, Result.SUCCEEDED, "done"),
                )
            elif story.cause == "hangs":
                self._schedule_hang(rank)
            elif rank == story.culprit:
                self.later(0.0, process.cause)
            elif self._agrees_to_stop:
                if (stops := story.rank(rank).stops) is not None:
                    self.later(stops, partial(process.say, Result.PREEMPTED, "stopped"))
            elif (notices := story.rank(rank).notices) is not None:
                # Neighbours see the cause's process go in the same moment at the earliest.
                self.later(notices, partial(process.say, *classify_error(LOST_PEER)))

    def _schedule_hang(self, rank: int) -> None:
        is_culprit = rank == self.story.culprit
        if is_culprit and self.story.rank(rank).stops is None:
            return  # it holds the GIL
        standstill = Standstill(silent_seconds=1800.0 - rank, waiting=not is_culprit)
        process = self.processes[rank]
        self.later(
            self.story.rank(rank).notices or 0.0,
            lambda: process.say(Result.HANG, "no step finished", standstill=standstill),
        )

    def _get_sigterm(self) -> None:
        if self.story.per_node == 1:
            self.processes[self.ranks[0]].terminate()
            return
        handler: Any = signal.getsignal(signal.SIGTERM)
        handler(signal.SIGTERM, None)

    def advance(self, until: float) -> None:
        """Go on to this time, at which what is due happens."""
        self.clock.advance(until - self.clock.now())
        while self.told and self.told[0][0] <= until:
            heapq.heappop(self.told)[2]()


class Selector:
    """Waits in the pod's time."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def __enter__(self) -> "Selector":
        return self

    def __exit__(self, *_: object) -> None: ...

    def register(self, *_: object) -> None: ...

    def unregister(self, _: object) -> None: ...

    def select(self, seconds: float | None) -> list[tuple[Any, int]]:
        """The processes that have ended, after `seconds` at most."""
        pod = self._pod
        deadline = None if seconds is None else pod.clock.now() + seconds
        while not pod.ended:
            following = pod.told[0][0] if pod.told else None
            if following is None or (deadline is not None and following > deadline):
                assert deadline is not None, "the supervisor waits for ever"
                pod.clock.advance(deadline - pod.clock.now())
                return []
            pod.advance(following)
        ended, pod.ended = pod.ended, []
        return [(SimpleNamespace(fileobj=0, data=pod.by_process[one]), 1) for one in ended]
