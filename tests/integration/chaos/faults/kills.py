"""Processes that are killed: the operator, the API server, etcd, and kubelets with their nodes."""

import random
import time

from ..ledger import Deed, Entry
from ..world import GPU_NODES, NODES, PODS, SILENT, Object, World, quiet
from .base import Fault

RACK = tuple(name for name in GPU_NODES if name.startswith(("h100", "cpu")))
"""Nodes that may be lost; the others keep the world going."""
LONGEST_ABSENCE = 2.0
"""Seconds."""


def operator_killed(world: World, chance: random.Random) -> str:
    """SIGKILL of the one that leads at any moment; the next one starts a moment later."""
    world.operators.leader_or_any().kill()
    return _operator_again(world, chance)


def operator_told_to_end(world: World, chance: random.Random) -> str:
    """SIGTERM to the one that leads, as by a rollout."""
    world.operators.leader_or_any().terminate()
    return _operator_again(world, chance)


def _operator_again(world: World, chance: random.Random) -> str:
    pause = chance.choice((0.0, 0.0, chance.uniform(0, LONGEST_ABSENCE)))
    time.sleep(pause)
    world.operators.start()
    if ready := chance.random() < 0.7:
        world.operators.wait_ready()
    return f"away for {pause:.1f} s{'' if ready else ', not waited for'}"


def api_server_killed(world: World, chance: random.Random) -> str:
    """SIGKILL; the same data and port a moment later."""
    pause = chance.uniform(0, LONGEST_ABSENCE)
    world.cluster.stop_apiserver()
    time.sleep(pause)
    world.cluster.start_apiserver()
    world.reconnect()
    return f"away for {pause:.1f} s"


def etcd_killed(world: World, chance: random.Random) -> str:
    """SIGKILL of etcd, below an API server that goes on."""
    pause = chance.uniform(0, LONGEST_ABSENCE)
    world.cluster.control_plane.stop_etcd()
    time.sleep(pause)
    world.cluster.control_plane.start_etcd()
    return f"away for {pause:.1f} s"


def controllers_killed(world: World, _: random.Random) -> str:
    """SIGKILL of kube-controller-manager: Jobs, garbage collection, node life cycle; it comes back
    at once."""
    world.cluster.control_plane.restart_controllers()
    return "at once"


def kubelet_killed(world: World, chance: random.Random) -> str:
    """A node falls silent: its pods stay as they are, even when they are told to end, until it
    comes back."""
    name = chance.choice(RACK)
    silence = {"metadata": {"annotations": {SILENT: "true"}}}
    if not quiet(lambda: world.patch(NODES, "", name, silence)):
        return ""
    pods = _pods_on(world, name)
    _blame(world, pods)
    for pod in pods:
        _silence(world, pod, "true")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    unknown = {
        "type": "Ready",
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "lastTransitionTime": now,
    }
    quiet(lambda: world.patch(NODES, "", f"{name}/status", {"status": {"conditions": [unknown]}}))
    world.undo_after(chance.randint(3, 15), lambda: _back(world, name))
    return f"{name} with {len(pods)} pods"


def _pods_on(world: World, node: str) -> list[Object]:
    return world.items("/api/v1/pods", query=f"?fieldSelector=spec.nodeName={node}")


def _silence(world: World, pod: Object, value: str | None) -> None:
    metadata = pod["metadata"]
    silence = {"metadata": {"annotations": {SILENT: value}}}
    quiet(lambda: world.patch(PODS, metadata["namespace"], metadata["name"], silence))


def _blame(world: World, pods: list[Object]) -> None:
    """Notes for each job with pods there that it may lose them."""
    for pod in pods:
        uid = pod["metadata"].get("labels", {}).get("grpo.dev/job-uid")
        attempt = pod["metadata"].get("labels", {}).get("grpo.dev/attempt", "")
        if uid and attempt.isdigit():
            world.ledger.intend(Entry(uid, int(attempt), Deed.DISRUPTED, at=time.time()))


def _back(world: World, node: str) -> None:
    quiet(lambda: world.patch(NODES, "", node, {"metadata": {"annotations": {SILENT: None}}}))
    for pod in _pods_on(world, node):
        _silence(world, pod, None)


def node_deleted(world: World, chance: random.Random) -> str:
    """The machine is gone for good, and a new one of its name comes later."""
    name = chance.choice(RACK)
    pods = _pods_on(world, name)
    _blame(world, pods)
    if not quiet(lambda: world.client.request("DELETE", f"{NODES}/{name}")):
        return ""
    for pod in pods:
        _silence(world, pod, "true")
    world.undo_after(chance.randint(3, 15), lambda: _new_machine(world, name))
    return f"{name} with {len(pods)} pods"


def _new_machine(world: World, name: str) -> None:
    """What the old machine's pods were is forgotten: the pod garbage collector ends them, here at
    once."""
    for pod in _pods_on(world, name):
        if SILENT in pod["metadata"].get("annotations", {}):
            world.delete(
                PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], gracePeriodSeconds=0
            )
    quiet(lambda: world.add_node(name))


def node_cordoned(world: World, chance: random.Random) -> str:
    """No new pods for a while."""
    name = chance.choice(RACK)
    if not quiet(lambda: world.patch(NODES, "", name, {"spec": {"unschedulable": True}})):
        return ""
    uncordon = {"spec": {"unschedulable": None}}
    world.undo_after(
        chance.randint(3, 15), lambda: quiet(lambda: world.patch(NODES, "", name, uncordon))
    )
    return name


FAULTS = (
    Fault("operator killed", 6, operator_killed, disturbs=True),
    Fault("operator told to end", 3, operator_told_to_end, disturbs=True),
    Fault("API server killed", 2, api_server_killed, disturbs=True),
    Fault("etcd killed", 2, etcd_killed, disturbs=True),
    Fault("controller manager killed", 1, controllers_killed, disturbs=True),
    Fault("kubelet killed", 3, kubelet_killed),
    Fault("node deleted", 2, node_deleted),
    Fault("node cordoned", 2, node_cordoned),
)
