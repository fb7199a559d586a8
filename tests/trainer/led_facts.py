"""Tells what two ranks see of work that one of them does: results, errors, signs of life,
completions of engines."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from grpo_trainer.gang import ranks
from grpo_trainer.gang.ranks import run_on_leader, run_on_rank0
from grpo_trainer.generation.generation_base import EngineSetup, Sample
from grpo_trainer.generation.remote_engines import ServersGeneration
from grpo_trainer.runtime.errors import BadInput, EngineLost, HubUnavailable
from grpo_trainer.telemetry.phases import PhaseClock
from tests.support.ranks import runs


class FakeMain:
    """Rank 0's part, with engines that complete a prompt by its first token and its seed."""

    def __init__(self) -> None:
        self.rounds = 0

    def begin_generation(
        self, wanted: list[tuple[list[int], int]], _: Any, **_options: bool
    ) -> None:
        """Keep what is wanted."""
        self.wanted = wanted

    def continue_generation(self, version: int) -> bool:
        """At first there is no engine."""
        self.version, self.rounds = version, self.rounds + 1
        return self.rounds > 1

    def await_engine(self) -> None:
        """One comes."""

    def samples(self) -> list[Sample]:
        """All of them."""
        return [Sample([prompt[0], seed], [0.0, 0.0], self.version) for prompt, seed in self.wanted]

    def take_failures(self) -> int:
        """One proof failed meanwhile."""
        return 1

    def metrics(self, _: int | None) -> dict[str, float]:
        """None."""
        return {}


class Brought(ServersGeneration):
    """Whose weights are brought by a word."""

    def attempt_sync(self, _: int) -> list[str]:
        """All is well."""
        return []


def failing_leaders() -> dict[str, str]:
    """What this rank raises if both ranks lead themselves, and each fails in its own way."""

    def fail() -> None:
        raise (BadInput, HubUnavailable)[ranks.rank()](f"of {ranks.rank()}")

    try:
        run_on_leader(ranks.rank(), fail)
    except Exception as error:
        return {"failing": f"{type(error).__name__}: {error}"}
    return {}


def stopped_leader() -> dict[str, int]:
    """How many signs rank 0 has of its leader, rank 1, before that is stopped for some periods, and
    while it is."""
    goes_on, signs = threading.Event(), [0]
    if ranks.rank() == 1:
        signal.signal(signal.SIGCONT, lambda *_: goes_on.set())
    leader = ranks.gather(os.getpid())[1]

    def sign() -> None:
        signs[0] += 1

    def stop() -> None:
        while signs[0] < 3:
            time.sleep(ranks.PERIOD_SECONDS)
        os.kill(leader, signal.SIGSTOP)
        before = signs[0]
        time.sleep(10 * ranks.PERIOD_SECONDS)
        counts.update(before=before, meanwhile=signs[0] - before)
        os.kill(leader, signal.SIGCONT)

    def work() -> None:
        # In slices: a wait without end hears no signal that another thread of its process got.
        while not goes_on.wait(ranks.PERIOD_SECONDS):
            pass

    counts: dict[str, int] = {}
    stopper = threading.Thread(target=stop) if ranks.rank() == 0 else None
    if stopper:
        stopper.start()
    run_on_leader(1, work, sign)
    if stopper:
        stopper.join()
    return counts


def facts(folder: Path) -> dict[str, Any]:
    """What this rank sees."""
    ranks.PERIOD_SECONDS = 0.05
    rank, enough = dist.get_rank(), threading.Event()
    signs: list[int] = []

    def sign() -> None:
        signs.append(1)
        if len(signs) == 3:
            enough.set()

    def lost() -> None:
        raise EngineLost("no engine was left")

    def wrong() -> None:
        raise KeyError("x")

    def long() -> str:
        enough.wait()
        assert threading.current_thread() is threading.main_thread()
        return "from rank 0"

    found: dict[str, Any] = {"word": run_on_rank0(long, sign), "signs": len(signs)}
    for name, work in (("error", lost), ("bug", wrong)):
        try:
            run_on_rank0(work, lambda: None)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    setup = EngineSetup(
        runs.plan(folder / "model"), folder, PhaseClock(lambda: 0.0), lambda _: None, lambda: None
    )
    engine = Brought.__new__(Brought)
    super(ServersGeneration, engine).__init__(setup, cast(Any, None), [1])
    engine._main = cast(Any, FakeMain()) if rank == 0 else None
    engine.proven_version = 5
    prompts = [[10 * rank + number] for number in range(2)]
    samples = engine.sample(prompts, [7, 8], {})
    found |= failing_leaders() | stopped_leader()
    return found | {
        "tokens": [one.tokens for one in samples],
        "versions": sorted({one.version for one in samples}),
    }
