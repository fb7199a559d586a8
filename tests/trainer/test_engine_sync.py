"""One pass of weights over several engines: what rank 0 waits for, what each engine is proven by,
and whose time is up.

The groups and the engines' answers are made here; test_engine_transfer.py has real groups,
test_engine_servers.py real engines.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_trainer.engine_pod.hash_check import expected_prints
from grpo_trainer.engine_pod.transfer import Meeting, TransferFailed
from grpo_trainer.engine_pod.weight_layout import Strided
from grpo_trainer.generation import sync_pass
from grpo_trainer.generation.engine_client import EngineFailed, EngineUnreachable, Prints
from grpo_trainer.generation.fleet import Engine, EngineView
from grpo_trainer.generation.remote_engines import EnginesMain
from grpo_trainer.generation.sync_pass import Lane, Sources, SyncPass, Verdict
from grpo_trainer.runtime.clock import SYSTEM_CLOCK
from grpo_trainer.runtime.errors import WeightSyncTimeout
from harness.programs.patience import wait_for_event
from tests.stepped_clock import SteppedClock
from tests.support.ranks import runs
from tests.virtual_time import virtually

VERSION, SEED, SECONDS = 7, 11, 60.0
NAME = "norm.weight"
SENT = torch.arange(4.0)
WHOLE: Strided = (0, (4,), (1,))


class FakeFleet:
    """Sends requests nowhere: every engine has come at once."""

    def start(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """Answered already."""
        work.close()
        answered: Future[None] = Future()
        answered.set_result(None)
        return answered

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In virtual time."""
        return virtually(work)


class FakeClient:
    """An engine that has what it was sent, and hashes it."""

    def __init__(self, prove: Callable[[], None]) -> None:
        self.prove = prove
        self.received = torch.zeros(4)
        self.confirmed: list[int] = []

    async def sync(self, *_: Any) -> None:
        """Comes for the weights."""

    async def prints(self, *_: Any) -> Prints:
        """Of what it has received."""
        self.prove()
        return [{NAME: expected_prints(self.received, [WHOLE], SEED)}]

    async def confirm(self, version: int) -> None:
        """Serves it from now on."""
        self.confirmed.append(version)


class FakeGroup:
    """A weight group whose other side takes a tensor as the test says."""

    def __init__(self, engine: Engine, take: Callable[[], None]) -> None:
        self.client: Any = engine.client
        self.take = take
        self.limits: list[float] = []
        self.was_left = False

    def broadcast(self, tensor: torch.Tensor, _: str, seconds: float) -> None:
        """The engine has it afterwards."""
        self.limits.append(seconds)
        self.take()
        self.client.received = tensor.clone()

    def leave(self) -> None:
        """Nothing more is sent."""
        self.was_left = True


class World:
    """Engines with lanes, all proven to have an earlier version."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        takes: Mapping[int, Callable[[], None]] | None = None,
        proves: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        """`takes`: what the second side of an engine's group does first, by its index; `proves`:
        what an engine does when it is asked for hashes."""
        self.clock = SteppedClock()
        self.groups: dict[str, FakeGroup] = {}
        self.lanes: list[Lane] = []
        monkeypatch.setattr(
            sync_pass, "form_group", lambda meeting, *_: self.groups[meeting.engine]
        )
        for index in range(2):
            client: Any = FakeClient((proves or {}).get(index, lambda: None))
            engine = Engine(EngineView(index, f"host-{index}"), client)
            engine.view.record_answer(f"process-{index}")
            engine.view.record_proof(VERSION - 1)
            lane = Lane(engine, f"process-{index}", self.clock)
            lane.workers = [{NAME: [WHOLE]}]
            self.lanes.append(lane)
            self.groups[engine.view.name] = FakeGroup(
                engine, (takes or {}).get(index, lambda: None)
            )
        fleet: Any = FakeFleet()
        self.sending = SyncPass(fleet, self.lanes, VERSION, SEED)
        self.sending.begin([self.meeting(lane) for lane in self.lanes], [NAME])

    def meeting(self, lane: Lane) -> Meeting:
        """Of a lane with one worker."""
        return Meeting(
            "trainer-0",
            29600,
            lane.group_name(),
            lane.engine.view.name,
            workers=1,
            seconds=SECONDS,
            gpu=False,
        )

    def group(self, index: int) -> FakeGroup:
        """An engine's."""
        return self.groups[self.lanes[index].engine.view.name]

    def finished(self) -> list[Verdict]:
        """What became of the engines."""
        return self.sending.finish()


def test_engines_that_have_what_was_sent_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.sending.send(NAME, SENT)
    assert [verdict.problem for verdict in world.finished()] == ["", ""]
    assert all(
        lane.engine.view.is_serving(VERSION) and not lane.engine.is_syncing for lane in world.lanes
    )


def test_a_tensor_may_change_once_every_engine_has_taken_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        began.set()
        assert wait_for_event(go_on, 60)

    world = World(monkeypatch, takes={1: slowly})
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(world.sending.send, NAME, SENT)
        assert wait_for_event(began, 60)
        fast = world.lanes[0].pending
        assert fast is not None
        fast.result(60.0)
        early = wait(
            [sending], timeout=0.2
        ).done  # however busy the machine is: it waits for `go_on`
        go_on.set()
        sending.result(60.0)
    assert not early


def test_an_engine_with_another_bit_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.sending.send(NAME, SENT)
    client: Any = world.lanes[1].engine.client
    client.received[2] += 1
    sound, other = world.finished()
    assert (sound.problem, other.differing_weights) == ("", [NAME])
    assert client.confirmed == []
    assert not world.lanes[1].engine.view.is_serving(VERSION)


def test_an_engine_that_restarts_while_it_is_proven_serves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(
        monkeypatch, proves={0: lambda: world.lanes[0].engine.view.record_answer("another process")}
    )
    world.sending.send(NAME, SENT)
    restarted, sound = world.finished()
    assert (restarted.problem, sound.problem) == ("restarted during the sync", "")
    assert not world.lanes[0].engine.view.is_serving(VERSION)


def test_a_pass_gives_each_engine_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, takes={0: lambda: world.clock.advance(25.0)})
    for _ in range(2):
        world.sending.send(NAME, SENT)
    assert world.group(0).limits == [SECONDS, SECONDS - 25.0]
    assert world.lanes[0].seconds_left == SECONDS - 50.0
    assert [verdict.is_blocked for verdict in world.finished()] == [False, False]


def test_an_engine_that_blocks_is_left_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def block() -> None:
        world.clock.advance(SECONDS)
        raise TransferFailed("nobody took it")

    world = World(monkeypatch, takes={0: block})
    for _ in range(2):
        world.sending.send(NAME, SENT)
    assert len(world.group(0).limits) == 1, "what failed is sent nothing more"
    world.lanes[0].request = Future()  # it has not answered
    blocked, sound = world.finished()
    assert (blocked.problem, blocked.is_blocked, sound.problem) == ("nobody took it", True, "")
    assert world.group(0).was_left
    assert world.lanes[1].engine.view.is_serving(VERSION)


def test_a_transfer_that_never_returns_is_given_up_and_the_other_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL, which waits without a limit while it makes a communicator."""
    end = threading.Event()

    def block() -> None:
        wait_for_event(end, 60)

    def send_twice() -> None:
        for _ in range(2):
            world.sending.send(NAME, SENT)

    monkeypatch.setattr(sync_pass, "MARGIN_SECONDS", 0.1)
    world = World(monkeypatch, takes={0: block})
    world.lanes[0].seconds_left = 0.1
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_twice)
        is_over = wait([sending], timeout=10.0).done
        world.lanes[0].request = Future()  # the engine's worker waits in the same way
        blocked, sound = world.finished() if is_over else (None, None)
        end.set()
    assert blocked is not None, "the pass waits for ever"
    assert sound is not None
    assert (blocked.is_blocked, sound.problem) == (True, "")
    assert f"{NAME} of version {VERSION}" in blocked.problem
    assert "NetworkPolicy" in blocked.problem
    assert world.group(0).was_left


def test_a_group_that_ends_late_keeps_no_other_engine_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL's, whose abort may wait for a dead GPU for ever (ProcessGroupNCCL.cpp)."""
    is_proven, end = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def fail() -> None:
        raise TransferFailed("nobody took it")

    def leave_late() -> None:
        in_time.append(wait_for_event(is_proven, 2))
        wait_for_event(end, 60)

    monkeypatch.setattr(sync_pass, "MARGIN_SECONDS", 0.1)
    world = World(monkeypatch, takes={0: fail}, proves={1: is_proven.set})
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(FakeFleet, "call", staticmethod(loop.run_until_complete))
    monkeypatch.setattr(world.group(0), "leave", leave_late)
    world.sending.send(NAME, SENT)
    world.lanes[0].request = Future()  # it has not answered
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(world.finished)
        is_over = bool(wait([finishing], timeout=10.0).done)
        end.set()
        failed, sound = finishing.result(60.0)
    loop.close()
    assert (in_time, is_over) == ([True], True)
    assert (failed.problem, sound.problem) == ("nobody took it", "")


def test_any_error_of_a_transfer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("tensors must be contiguous")

    world = World(monkeypatch, takes={0: fail})
    world.sending.send(NAME, SENT)
    world.lanes[0].request = Future()  # the engine still waits for the tensor
    failed, sound = world.finished()
    assert (failed.problem, sound.problem) == ("ValueError: tensors must be contiguous", "")
    assert not failed.is_blocked
    assert world.group(0).was_left


def test_a_process_that_comes_back_meets_in_another_group() -> None:
    client: Any = FakeClient(lambda: None)
    engine = Engine(EngineView(0, "host"), client)
    first, second = (Lane(engine, "process-0") for _ in range(2))
    assert first.group_name() != second.group_name()


def test_a_lane_of_a_lost_process_is_closed_at_once_whatever_its_group_takes_to_end() -> None:
    """While rank 0 does something for its engines, no watchdog calls it a hang (gang/ranks.py)."""
    client: Any = FakeClient(lambda: None)
    lane = Lane(Engine(EngineView(0, "host"), client), "process-0")
    is_closed, left = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def leave() -> None:
        in_time.append(wait_for_event(is_closed, 2))
        left.set()

    lane._group = SimpleNamespace(leave=leave)  # type: ignore[assignment]
    lane.close()
    is_closed.set()
    assert wait_for_event(left, 60)
    assert in_time == [True]


@pytest.mark.parametrize("learnt", [[], [({}, [])], [({NAME: [WHOLE]}, []), ({}, [])]])
def test_engines_learn_at_once_and_one_with_other_tensors_is_sent_none(learnt: list[Any]) -> None:
    answers = {"host-0": learnt, "host-1": [({NAME: [WHOLE]}, [])]}
    asked: list[str] = []

    class Client(FakeClient):
        host = ""

        async def learn(self, *_: Any) -> list[Any]:
            asked.append(self.host)
            await asyncio.sleep(1.0)
            assert len(asked) == len(answers), "nobody waits for another's layout"
            return answers[self.host]

    class Asking(EnginesMain):
        def __init__(self) -> None:
            fleet: Any = FakeFleet()
            fleet.usable_engines = lambda: engines
            setup: Any = SimpleNamespace(plan=runs.plan(Path("/models/demo")))
            self._fleet, self._setup, self._limit = fleet, setup, SECONDS
            self._shapes, self._config, self._lanes = {NAME: [4]}, "", {}

    engines: list[Engine] = []
    for index, host in enumerate(answers):
        client: Any = Client(lambda: None)
        client.host = host
        engines.append(Engine(EngineView(index, host), client))
        engines[-1].view.record_answer(f"process-{index}")
    assert [lane.engine for lane in Asking()._prepared_lanes(VERSION)] == engines[1:]
    assert engines[0].view.last_message == "has learnt other tensors than rank 0 sends"


class Judging(EnginesMain):
    """Rank 0 that has only verdicts to record."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize("present", ["process-0", None, "another process"])
def test_the_process_that_blocked_is_given_up_and_no_other(
    monkeypatch: pytest.MonkeyPatch, present: str | None
) -> None:
    world = World(monkeypatch)
    view = world.lanes[0].engine.view
    view.record_absence("does not answer")
    if present is not None:
        view.record_answer(present)
    blocked = Verdict(world.lanes[0].engine, "process-0", "nobody took it", is_blocked=True)
    Judging()._record_verdict(blocked)
    view.record_answer(present or "process-0")
    assert view.is_condemned == (present != "another process")
    assert view.losses == 1


def test_an_engine_that_is_gone_before_its_proof_is_told_from_one_that_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die() -> None:
        raise EngineUnreachable("can't be reached for /prove")

    world = World(monkeypatch, proves={0: die})
    world.sending.send(NAME, SENT)
    gone, sound = world.finished()
    assert (gone.is_gone, gone.is_blocked, sound.problem) == (True, False, "")


def test_a_proven_engine_is_not_sent_its_version_again_where_another_cannot_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Learning(EnginesMain):
        """Rank 0 with the engines of a world, of which new processes learn nothing."""

        def __init__(self, engines: list[Engine]) -> None:
            fleet: Any = FakeFleet()
            fleet.engines, fleet.usable_engines = engines, lambda: engines
            self._fleet, self._lanes, self._limit = fleet, {}, SECONDS

        async def _layouts_of(self, _: Engine) -> list[Sources]:
            raise EngineFailed("answered what can't be read")

    engines = [lane.engine for lane in World(monkeypatch).lanes]
    engines[0].view.record_proof(VERSION)
    assert not Learning(engines).begin_sync(VERSION, SYSTEM_CLOCK.now())
    assert engines[1].view.strikes == 1


@pytest.mark.parametrize("is_served", [True, False])
def test_processes_that_come_during_each_pass_get_no_more_passes_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
    is_served: bool,
) -> None:
    class Late(EnginesMain):
        """Rank 0 with new processes after each pass."""

        def __init__(self, engines: list[Engine]) -> None:
            fleet: Any = SimpleNamespace(engines=engines)
            self._fleet, self._limit = fleet, SECONDS

        def _prepared_lanes(self, _: int) -> list[Lane]:
            pytest.fail("one pass more")

        def _no_engine_message(self, what: str) -> str:
            return what

    engines = [lane.engine for lane in World(monkeypatch).lanes]
    began_at = SYSTEM_CLOCK.now() - SECONDS
    if is_served:
        engines[0].view.record_proof(VERSION)
        assert not Late(engines).begin_sync(VERSION, began_at)
        return
    with pytest.raises(WeightSyncTimeout, match=f"took version {VERSION} of the weights"):
        Late(engines).begin_sync(VERSION, began_at)
