"""What rank 0 answers to the operator's question how far it is: anything, at any length, or
never."""

import asyncio
import json
import random
import time

from aiohttp import web

from grpo_api.report.report import Result

from ..ledger import Deed, Entry
from ..progress_server import Say
from ..trainer import rank_of
from ..world import PODS, Object, World, quiet
from .base import Fault, name_of


def _text(text: str, kind: str = "application/json", after: float = 0.0) -> Say:
    async def say() -> web.StreamResponse:
        await asyncio.sleep(after)
        return web.Response(text=text, content_type=kind)

    return say


def _told(attempt: int, **fields: object) -> str:
    return json.dumps(
        {"attempt": attempt, "step": 3, "totalSteps": 8, "stage": "Training", **fields}
    )


def _answers(attempt: int, now: float) -> dict[str, Say]:
    """What may be said by an attempt at this unix time."""
    return {
        "the truth": _text(
            _told(
                attempt, lastStepTime=now, secondsPerStep=2.0, metrics={"kl": 0.01, "reward": 1.5}
            )
        ),
        "negative numbers": _text(
            _told(attempt, step=-3, secondsPerStep=-5, memory={"device": -1})
        ),
        "step 10^23": _text(_told(attempt, step=10**23, totalSteps=10**24)),
        "no finite number": _text(
            _told(attempt, secondsPerStep=float("nan"), metrics={"kl": float("inf")})
        ),
        "another attempt": _text(_told(attempt + 7)),
        "a step ten minutes ahead": _text(_told(attempt, lastStepTime=now + 600)),
        "a step two hours ago": _text(_told(attempt, lastStepTime=now - 7200)),
        "a step in the year 10^10": _text(_told(attempt, lastStepTime=1e18)),
        "more steps than there are": _text(_told(attempt, step=9, totalSteps=8)),
        "500 KB": _text(_told(attempt, samples=[{"completion": "x" * 1000}] * 500)),
        "10,000 metrics": _text(
            _told(attempt, metrics={f"m{number}": 1.0 for number in range(10_000)})
        ),
        "brackets": _text("[" * 100_000),
        "HTML": _text("<html>hello</html>", "text/html"),
        "nothing for a minute": _text("{}", after=60.0),
    }


def progress_lies(world: World, chance: random.Random) -> str:
    """Some rank 0 is at an address where a chosen answer is given from now on."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, pods = found
    attempt, address = job["status"]["attempt"], chance.choice(world.progress.addresses)
    kind = chance.choice(sorted(_answers(1, 0.0)))
    # a gang that says so is ended as a hang, as far as the operator believes it
    world.ledger.intend(
        Entry(job["metadata"]["uid"], attempt, Deed.ENDED, at=time.time(), result=Result.HANG)
    )
    world.progress.says[address] = _answers(attempt, time.time())[kind]
    pod = min(pods, key=rank_of)
    if not quiet(lambda: _moved(world, pod, address)):
        return ""
    return f"{name_of(job)} attempt {attempt}: {kind}"


def _moved(world: World, pod: Object, address: str) -> None:
    status = {"podIP": address, "podIPs": [{"ip": address}]}
    metadata = pod["metadata"]
    world.patch(PODS, metadata["namespace"], f"{metadata['name']}/status", {"status": status})


FAULTS = (Fault("rank 0's progress is anything", 5, progress_lies),)
