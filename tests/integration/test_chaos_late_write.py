"""A write that its sender was allowed to send, and that arrives when another leads: why there is a
fence.

The client's gate has let it pass, and its resourceVersion still is the newest: the new leader has
had no reason to write that object. So nothing but the fence refuses it.
"""

import time
from pathlib import Path

import pytest

from grpo_api.text.contract import API_VERSION, KIND
from harness.programs.patience import wait_for_event
from harness.programs.processes import until
from tests.integration.chaos.faults.stops import StoppedLeader
from tests.integration.chaos.history import Version
from tests.integration.chaos.invariants import FOREIGN_SECONDS
from tests.integration.chaos.observer import Observer
from tests.integration.chaos.population import GPU
from tests.integration.chaos.run import standing
from tests.integration.chaos.world import GRPOJOBS, PODS, Object, World

NODE, TEAM, ALL_GPUS = "h100-0", "default", 4
JOB = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "run"},
    "spec": GPU
    | {
        "rewards": [{"format": {"pattern": "a.*"}}],
        "placement": {"gpus": {"min": ALL_GPUS, "max": ALL_GPUS}, "nodes": 1},
        "export": {"to": "None"},
    },
}
SECONDS = 60.0


def take_gpus(world: World) -> None:
    """Binds a foreign pod, always of the same name, that takes all GPUs, as a StatefulSet's
    notebook does."""
    container = {
        "name": "c",
        "image": "x",
        "resources": {"limits": {"nvidia.com/gpu": str(ALL_GPUS)}},
    }
    spec = {"containers": [container], "tolerations": [{"operator": "Exists"}]}
    world.post(PODS, TEAM, {"metadata": {"name": "notebook-0"}, "spec": spec})
    until(
        "the notebook to be bound",
        lambda: world.get(PODS, TEAM, "notebook-0")["spec"].get("nodeName"),
        SECONDS,
    )


def status(world: World) -> Object:
    """The job's status as it is now."""
    found: Object = world.get(GRPOJOBS, TEAM, "run").get("status", {})
    return found


def late_admission(world: World, observer: Observer) -> list[Version]:
    """Stops the leader when it admits a job, and lets that write arrive when others have had the
    GPUs for long."""
    world.cluster.add_kwok_nodes(0, 0)
    world.add_node(NODE)
    world.operators.start()
    world.operators.wait_ready()
    take_gpus(world)
    world.post(GRPOJOBS, TEAM, JOB)
    until("the job to wait", lambda: status(world).get("phase") == "Queued", SECONDS)
    fault = StoppedLeader(world, hold=True)
    world.delete(PODS, TEAM, "notebook-0", gracePeriodSeconds=0)
    assert wait_for_event(fault.stopped, SECONDS)
    assert fault.writes == [f"PATCH {GRPOJOBS.format(TEAM)}/run/status"]
    take_gpus(world)
    until("another to lead", world.operators.leader, SECONDS)
    time.sleep(FOREIGN_SECONDS + 1)
    fault.go_on()
    time.sleep(2)
    with observer.frozen() as history:
        return next(iter(history.jobs.values())).versions


@pytest.mark.slow
@pytest.mark.parametrize("fence", [True, False])
def test_only_the_fence_refuses_an_admission_that_arrives_after_a_takeover(
    tmp_path: Path, fence: bool
) -> None:
    with standing("late", tmp_path, fence=fence) as (world, observer):
        versions = late_admission(world, observer)
        promised_twice = [
            one for one in observer.news() if one.startswith("gpus are never promised twice")
        ]
        assert max(one.attempt for one in versions) == (0 if fence else 1)
        assert bool(promised_twice) is not fence
