"""The jobs of three teams: CPUs and GPUs, one to four nodes, limits, deadlines, priorities, and
some that can't run."""

import random
from typing import Any

from grpo_api.text.contract import API_VERSION, KIND

from .world import GRPOJOBS, TEAMS, Object, World, quiet

POPULATION = 14
"""GRPOJobs that there are at a time, ended ones included."""
PRIORITIES = {"urgent": 1000, "usual": 10}
CPU = {
    "model": {"name": "/models/tiny", "parameters": "77K"},
    "dataset": {"name": "x/y"},
    "training": {"promptsPerStep": 12},
}
GPU = {
    "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"},
    "dataset": {"name": "x/y"},
    "training": {"promptsPerStep": 8, "numGenerations": 6},
}
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (3, 6), (2, 16))
"""Nodes and GPUs of a gang; the last needs both of the big nodes whole."""
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


def prepare(world: World) -> None:
    """Makes the priority classes."""
    for name, value in PRIORITIES.items():
        body = {"metadata": {"name": name}, "value": value}
        world.client.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)


def draw_spec(chance: random.Random) -> Object:
    """A spec of some team's."""
    spec: dict[str, Any] = {"rewards": [{"format": {"pattern": "a.*"}}], "export": {"to": "None"}}
    if chance.random() < 0.4:
        spec |= CPU | {"placement": {"accelerator": "CPU", "nodes": chance.choice((1, 2, 2, 3, 4))}}
    else:
        nodes, gpus = chance.choice(SHAPES)
        spec |= GPU | {"placement": {"gpus": {"min": gpus, "max": gpus}, "nodes": nodes}}
    if chance.random() < 0.3:
        spec["placement"]["priorityClassName"] = chance.choice(tuple(PRIORITIES))
    if chance.random() < 0.06:
        spec["placement"]["nodeSelector"] = {"there": "is-none"}
    if chance.random() < 0.7:
        spec["restarts"] = {"limit": chance.choice((0, 1, 3, 20))}
    if chance.random() < 0.5:
        spec["guard"] = {"onDivergence": "Rollback"}
    if chance.random() < 0.1:
        spec["activeDeadlineSeconds"] = chance.choice((5, 20, 600))
    if chance.random() < 0.3:
        spec["ttlSecondsAfterFinished"] = chance.choice((0, 5, 3600))
    if chance.random() < 0.3:
        retain = chance.random() < 0.5
        spec["checkpoint"] = {
            "volumeClaimTemplate": {"size": "1Gi", "accessMode": "ReadWriteMany", "retain": retain}
        }
    return spec


def job(name: str, spec: Object, **metadata: Any) -> Object:
    """A GRPOJob to be posted."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }


def top_up(world: World, chance: random.Random) -> None:
    """Deletes some jobs that have ended, and submits new ones until the population is whole, often
    under old names."""
    jobs = world.items("/apis/grpo.dev/v1alpha1/grpojobs")
    for one in jobs:
        if one.get("status", {}).get("phase") in ("Succeeded", "Failed") and chance.random() < 0.3:
            world.delete_job(
                one, chance.choice(("Background", "Foreground", "Orphan")), chance.randint(1, 8)
            )
    free = [(team, name) for team in TEAMS for name in NAMES]
    taken = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in jobs}
    free = [place for place in free if place not in taken]
    for _ in range(POPULATION - len(jobs)):
        team, name = free.pop(chance.randrange(len(free)))
        body = job(name, draw_spec(chance))
        if "checkpoint" in body["spec"]:
            _add_volume(world, chance)
        quiet(lambda team=team, body=body: world.post(GRPOJOBS, team, body))  # type: ignore[misc]


def _add_volume(world: World, chance: random.Random) -> None:
    """What a provisioner would make for the job's claim."""
    spec: Object = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": "/nowhere"},
    }
    body = {"metadata": {"name": f"volume-{chance.randrange(10**9)}"}, "spec": spec}
    quiet(lambda: world.client.request("POST", "/api/v1/persistentvolumes", body))
