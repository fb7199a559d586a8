"""What a simulated gang really did: a trainer's time and what it sealed, its pods, and so its GPUs.
In seconds."""

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_api.status.usage import GPUSeconds
from grpo_api.text.timing import Account, Beginning, Clock
from tests.unit.operator_world import GPU_PLAN, KEY

NEVER = float("inf")
GPUS_PER_POD = GPU_PLAN.gpus_per_node


class Run:
    """A trainer's time in one attempt: what it did when, and what it sealed."""

    def __init__(self, chance: random.Random, began_at: Beginning, begin: float) -> None:
        self.began_at = began_at
        self.begin = begin
        self._times: list[float] = []
        self._clocks: list[Clock] = []
        self._parts: list[str] = []
        self.seals: list[tuple[float, Clock]] = []
        self.known_at = NEVER
        self._write(chance)

    def _write(self, chance: random.Random) -> None:
        now, spent = self.begin, Clock()
        every = chance.choice((4, 10, 10_000))
        for step, part in enumerate(_script()):
            if now > self.begin + 6000.0:
                break
            if part == "saving" and (step // 4) % every:
                continue
            if part == "generating" and self.known_at == NEVER:
                self.known_at = now
            lasts = chance.uniform(*_LASTS[part])
            self._times.append(now)
            self._clocks.append(spent)
            self._parts.append(part)
            now += lasts
            spent = spent.model_copy(update={part: getattr(spent, part) + lasts})
            if part == "saving":
                self.seals.append((now, spent))

    def parts(self) -> Iterator[tuple[float, str]]:
        """What it began to do when."""
        return zip(self._times, self._parts, strict=True)

    def clock(self, when: float) -> Clock:
        """What it has spent its time on by then."""
        place = bisect_right(self._times, when) - 1
        part, spent = self._parts[place], self._clocks[place]
        value = round(getattr(spent, part) + when - self._times[place], 3)
        return spent.model_copy(update={part: value})

    def sealed(self, when: float) -> Clock:
        """The same at the last checkpoint that it had sealed by then."""
        return next((clock for time, clock in reversed(self.seals) if time <= when), Clock())

    def account(self, when: float) -> Account:
        """What it says of itself then."""
        known = self.began_at if when >= self.known_at else None
        return Account(clock=self.clock(when), sealed=self.sealed(when), began_at=known)


_LASTS = {
    "loading": (10.0, 60.0),
    "proving": (2.0, 10.0),
    "generating": (5.0, 25.0),
    "scoring": (1.0, 5.0),
    "training": (5.0, 20.0),
    "saving": (5.0, 15.0),
}


def _script() -> Iterator[str]:
    yield from ("loading", "proving")
    while True:
        yield from ("generating", "scoring", "training", "saving")


@dataclass
class Pod:
    """A pod as it really was."""

    attempt: int
    index: int
    clock_off: float
    bound: float
    started: float = NEVER
    ended: float = NEVER
    """End of its container, and of its hold on the GPUs."""
    deleted: float = NEVER
    gone: float = NEVER
    """When the API server forgets it."""
    code: int = 137
    message: str = ""

    @property
    def name(self) -> str:
        return f"{KEY.name}-{self.attempt}-{self.index}-abcde"


@dataclass
class Gang:
    """An attempt as it really was."""

    attempt: int
    loss: str
    pods: list[Pod]
    run: Run | None = None
    job_ended: float = NEVER
    job_gone: float = NEVER

    @property
    def until(self) -> float:
        """When rank 0 ended."""
        return self.pods[0].ended


def truth(gang: Gang) -> GPUSeconds:
    """What its GPUs really did."""
    pods = [pod for pod in gang.pods if pod.bound < NEVER]
    held = sum(pod.ended - pod.bound for pod in pods)
    run = gang.run
    if run is None or gang.until <= run.begin:
        return GPUSeconds(other=round(held * GPUS_PER_POD, 3))
    clock, sealed = run.clock(gang.until), run.sealed(gang.until)
    states = {part: value * len(pods) for part, value in clock.model_dump(by_alias=False).items()}
    lead = sum(run.begin - pod.bound for pod in pods)
    tail = held - lead - sum(states.values())
    lost = 0.0
    if gang.loss != "succeeded" and gang.until >= run.known_at:
        for part in ("generating", "scoring", "training", "saving"):
            redone = states[part] - getattr(sealed, part) * len(pods)
            states[part] -= redone
            lost += redone
        lost, tail = lost + tail, 0.0
    states |= {"lost": lost, "other": lead + tail}
    return GPUSeconds(
        **{state: round(max(0.0, value) * GPUS_PER_POD, 3) for state, value in states.items()}
    )
