"""Many targets, of which some don't answer: whoever answers keeps the interval, on a clock that
jumps."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Progress
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.loop.progress import SLOWEST, ProgressPuller, PullFailed, Target
from tests.generated import cases
from tests.unit.operator_world import KEY, UID, active_status, make_job
from tests.virtual_time import virtually

INTERVAL = 5.0
SECONDS = 120.0
NEVER = float("inf")


@dataclass(frozen=True)
class Mix:
    """How many targets answer quickly, take their time, refuse and are silent; `turning` fall
    silent after a while."""

    quick: int
    slow: int
    refusing: int
    silent: int
    turning: int

    def delays(self) -> dict[str, float]:
        """Seconds until each address answers; below 0: it refuses."""
        kinds = {"quick": 0.02, "slow": 1.0, "refusing": -1.0, "silent": NEVER, "turning": 0.02}
        return {
            f"{kind}-{n}": delay
            for kind, delay in kinds.items()
            for n in range(getattr(self, kind))
        }


class Gangs:
    """The rank 0s of a mix, and when each gave an answer."""

    def __init__(self, delays: Mapping[str, float], turn: float) -> None:
        self.delays, self.turn = delays, turn
        self.answers: dict[str, list[float]] = {address: [0.0] for address in delays}
        self.asked: Counter[str] = Counter()
        self.flying = self.most = 0

    async def fetch(self, target: Target) -> Progress:
        address = target.ip
        self.asked[address] += 1
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await self._answer(address)
        finally:
            self.flying -= 1
        self.answers[address].append(asyncio.get_running_loop().time())
        return Progress(attempt=1)

    async def _answer(self, address: str) -> None:
        silent = address.startswith("turning") and asyncio.get_running_loop().time() > self.turn
        delay = NEVER if silent else self.delays[address]
        if delay < 0:
            raise PullFailed("refused")
        await asyncio.sleep(min(delay, 1e6))

    def longest_gap(self, kind: str, until: float = SECONDS, since: float = 0.0) -> float:
        """Longest time that a target of that kind went without an answer, of those that ended after
        `since`."""
        gaps = [0.0]
        for address, times in self.answers.items():
            if address.startswith(kind):
                ends = [*times[1:], until]
                gaps += [
                    later - earlier
                    for earlier, later in zip(times, ends, strict=True)
                    if later > since
                ]
        return max(gaps)


async def followed(mix: Mix, turn: float = 47.0, seconds: float = SECONDS) -> Gangs:
    gangs = Gangs(mix.delays(), turn)
    targets = [
        Target(ObjectKey("n", address), address, address, "job", 1) for address in gangs.delays
    ]
    puller = ProgressPuller(lambda: targets, gangs.fetch, lambda _: None, INTERVAL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await puller.run()
    return gangs


def test_700_silent_targets_of_1000_delay_no_other() -> None:
    gangs = virtually(followed(Mix(quick=300, slow=0, refusing=0, silent=700, turning=0)))
    assert gangs.longest_gap("quick") < 2 * INTERVAL


def test_700_that_fall_silent_at_once_delay_no_other() -> None:
    gangs = virtually(followed(Mix(quick=300, slow=0, refusing=0, silent=0, turning=700)))
    assert gangs.longest_gap("quick") < 2 * INTERVAL


def test_those_that_take_their_time_wait_for_silent_ones_only_at_first() -> None:
    seconds = 4 * SECONDS
    gangs = virtually(
        followed(Mix(quick=0, slow=30, refusing=0, silent=700, turning=0), seconds=seconds)
    )
    assert gangs.longest_gap("slow", seconds, since=SECONDS + 3 * INTERVAL) < 3 * INTERVAL


@settings(max_examples=cases(4))
@given(
    mix=st.builds(
        Mix,
        quick=st.integers(1, 400),
        slow=st.integers(0, 60),
        refusing=st.integers(0, 400),
        silent=st.integers(0, 400),
        turning=st.integers(0, 400),
    ),
    turn=st.floats(1.0, 100.0),
)
def test_whoever_answers_is_asked_in_time_whatever_the_others_do(mix: Mix, turn: float) -> None:
    gangs = virtually(followed(mix, turn))
    assert gangs.longest_gap("quick") < 2 * INTERVAL + 1
    # the slow have a lane of their own, which those that fell silent hold up once
    waited = 3.0 * (mix.silent + mix.turning) / 32
    assert gangs.longest_gap("slow") < 3 * INTERVAL + 2 * waited
    assert gangs.most <= 112
    refused = [gangs.asked[address] for address in gangs.delays if address.startswith("refusing")]
    assert all(1 <= count <= 10 for count in refused)


def test_a_silent_target_that_speaks_again_returns_to_the_interval() -> None:
    async def story() -> Gangs:
        gangs = Gangs({"once": NEVER}, NEVER)
        target = Target(ObjectKey("n", "once"), "uid", "once", "job", 1)
        puller = ProgressPuller(lambda: [target], gangs.fetch, lambda _: None, INTERVAL)
        running = asyncio.create_task(puller.run())
        await asyncio.sleep(300)
        gangs.delays = {"once": 0.02}
        await asyncio.sleep(70)
        gangs.answers["once"] = [asyncio.get_running_loop().time()]
        await asyncio.sleep(60)
        running.cancel()
        return gangs

    gangs = virtually(story())
    assert gangs.longest_gap("once", 430.0) < 2 * INTERVAL


def test_a_target_that_refuses_for_a_day_is_asked_on() -> None:
    day = 86400.0  # so many doublings of a pause are no float any more
    mix = Mix(quick=0, slow=0, refusing=1, silent=0, turning=0)
    gangs = virtually(followed(mix, seconds=day))
    assert gangs.asked.total() > day / SLOWEST / 1.2


def test_a_target_whose_answer_is_a_mistake_of_ours_is_asked_on() -> None:
    asked: list[str] = []

    async def fetch(target: Target) -> Progress:
        asked.append(target.ip)
        raise ValueError("an answer that nobody thought of")

    target = Target(KEY, "a", "a", UID, 1)
    puller = ProgressPuller(lambda: [target], fetch, lambda _: None, INTERVAL)

    async def story() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await puller.run()

    virtually(story())
    silence = puller.silence(make_job(status=active_status()))
    assert len(asked) > 2
    assert silence is not None
    assert silence.problem == "an answer that nobody thought of"


def test_a_target_that_is_gone_before_its_turn_is_not_asked() -> None:
    async def story() -> Gangs:
        gangs = Gangs(Mix(quick=0, slow=0, refusing=0, silent=400, turning=0).delays(), NEVER)
        targets = [
            Target(ObjectKey("n", address), address, address, "job", 1) for address in gangs.delays
        ]
        puller = ProgressPuller(lambda: targets, gangs.fetch, lambda _: None, INTERVAL)
        running = asyncio.create_task(puller.run())
        await asyncio.sleep(10)
        targets.clear()
        await asyncio.sleep(INTERVAL)
        before = gangs.asked.total()
        await asyncio.sleep(60)
        running.cancel()
        assert gangs.asked.total() == before
        return gangs

    assert virtually(story()).flying == 0
