"""Whatever happens to nodes, pods and jobs: in the end every gang that fits has run, and its
account has the GPU-seconds that its pods held."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.generated import cases
from tests.unit.admission_world import Gang, World

ROUNDS = 40
"""Rounds in which others do something."""
LONGEST_ROUND = 40.0
SECONDS_PER_GANG = 500.0
"""Most that a gang runs, with the rounds until its end is seen."""
PAUSES = 2000.0
"""Most that released gangs stay out of the queue, and that their nodes are waited for."""
ROUNDED_SECONDS = 2.0
"""What times in whole seconds leave out of a pod's time."""


async def live(world: World) -> None:
    """Others do something for a while; then all nodes are free, and the gangs end."""
    for _ in range(ROUNDS):
        if world.chance.random() < 0.5:
            world.disturb()
        await world.round(world.chance.choice([1, 2, 5, 10, 30]))
    world.foreign = []
    world.nodes = {name: replace(node, usable=True) for name, node in world.nodes.items()}
    calm_since, pause = world.now, 1.0
    while not all(map(world.is_over, world.gangs.values())):
        requeue_after = await world.round(min(LONGEST_ROUND, max(1.0, pause)))
        pause = requeue_after or LONGEST_ROUND
        longest = SECONDS_PER_GANG * len(world.gangs) + PAUSES
        late = [one.key for one in world.gangs.values() if not world.is_over(one)]
        assert world.now - calm_since < longest, late
    await world.round(LONGEST_ROUND)


def is_accounted(one: Gang) -> bool:
    """True if the job's status has the time of its pods, but for what nobody could see."""
    usage = one.status.get("usage", {})
    pods = one.plan.nodes * (len(usage.get("attempts", [])) + 1)
    unknown = one.unseen + ROUNDED_SECONDS * pods * one.plan.gpus_per_node
    held = float(usage.get("heldGpuSeconds", 0.0))
    return abs(held - one.held) <= unknown


@pytest.mark.seeded
def test_every_gang_that_fits_runs_and_its_gpu_seconds_are_accounted_for(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Callable[..., Any], *given: Any) -> Any:
        return work(*given)

    monkeypatch.setattr("asyncio.to_thread", at_once)
    for _ in range(cases(16, gate=4)):
        world = World(random.Random(chance.getrandbits(64)))
        asyncio.run(live(world))
        wrong = [one for one in world.gangs.values() if not is_accounted(one)]
        assert not wrong, [(one.name, one.held, one.status.get("usage")) for one in wrong]
