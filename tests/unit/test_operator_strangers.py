"""Webhooks and controllers of others change what the operator made: no gang runs on beside the
next one, and no attempt is lost."""

from typing import Any

import pytest

from grpo_kube.objects.resources import Object
from tests.unit.test_operator_slow_ends import SlowEnds
from tests.unit.test_operator_writes import ENDS, KINDS, LIMIT, check, end_of, undisturbed
from tests.virtual_time import virtually


class Meshed(SlowEnds):
    """A cluster whose webhook gives each pod a second container, which never ends by itself."""

    def set_state(self, pod: Object, state: Object, **status: Any) -> None:
        containers = [
            {"name": "trainer", "state": state},
            {"name": "proxy", "state": {"running": {}}},
        ]
        super().set_state(pod, state, phase="Running", containerStatuses=containers, **status)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_whose_second_container_runs_on_holds_no_gpu_after_its_attempt(
    kind: str, ends: str
) -> None:
    spec, plan = KINDS[kind]
    world = Meshed({**spec, **LIMIT}, plan, ends=ENDS[ends])
    virtually(world.live())
    check(world)
    assert end_of(world) == end_of(undisturbed(kind, ends))
