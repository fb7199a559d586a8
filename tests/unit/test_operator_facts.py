"""What admission knows of the cluster: what counts, who is woken by what, and what is not relied
on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from grpo_kube.objects.errors import ClusterError, Forbidden, NotFound, Unavailable
from grpo_kube.objects.resources import (
    NODES,
    PODS,
    PRIORITY_CLASSES,
    QUOTAS,
    SERVICE_ACCOUNTS,
    Selection,
)
from grpo_operator.loop import cluster_state as facts_module
from grpo_operator.loop.cluster_state import ClusterState
from grpo_operator.records.job_class import ENFORCE_LABEL
from tests.unit.test_operator_inventory import node, pod

DEFAULT = {"storageclass.kubernetes.io/is-default-class": "true"}

Object = dict[str, Any]


def meta(item: Object, name: str, version: int = 1, **more: Any) -> Object:
    known = item.get("metadata", {})
    return {
        **item,
        "metadata": {
            "uid": f"uid-{name}",
            **known,
            "name": name,
            "resourceVersion": str(version),
            **more,
        },
    }


class Script:
    """A cluster with these objects, and events that a test sends; errors by (plural, namespace)."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {
            "nodes": [meta(node(), "node-0")],
            "pods": [meta(pod("p", {"nvidia.com/gpu": "2"}), "p", namespace="team-a")],
            "priorityclasses": [
                meta({"value": 7, "globalDefault": True}, "another"),
                meta({"value": 5, "globalDefault": True}, "usual"),
                meta({"value": 9}, "high"),
            ],
            "storageclasses": [
                meta({"provisioner": "ebs.csi.aws.com"}, "gp3", annotations=DEFAULT),
                meta({"provisioner": "efs.csi.aws.com"}, "efs"),
            ],
            "resourcequotas": [meta({"status": {"hard": {"pods": "3"}}}, "q", namespace="team-a")],
            "serviceaccounts": [meta({}, "default", namespace="team-a")],
            "grpojobclasses": [meta({"spec": {}}, "h100", generation=2)],
            "namespaces": [meta({}, "team-a", labels={ENFORCE_LABEL: "baseline"})],
        }
        self.errors: dict[tuple[str, str | None], ClusterError] = {}
        self.events: dict[tuple[str, str | None], asyncio.Queue[tuple[str, Object]]] = {}
        self.lists: list[tuple[str, str | None]] = []

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        which = (selection.resource.plural, selection.namespace)
        self.lists.append(which)
        if error := self.errors.get(which):
            raise error
        there = self.objects[selection.resource.plural]
        yield (
            [
                one
                for one in there
                if selection.namespace in (None, one["metadata"].get("namespace"))
            ],
            1,
        )

    async def watch(self, selection: Selection, *_: float) -> AsyncIterator[tuple[str, Object]]:
        events = self.events.setdefault(
            (selection.resource.plural, selection.namespace), asyncio.Queue()
        )
        while True:
            yield await events.get()

    async def tell(self, plural: str, kind: str, item: Object) -> None:
        for (name, _), queue in self.events.items():
            if name == plural:
                queue.put_nowait((kind, item))
        await settled()


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


class Watching:
    """Facts that follow a script, and how often they woke somebody."""

    def __init__(self, script: Script, *namespaces: str) -> None:
        self.woken = 0
        self.facts = ClusterState(script, self._wake, namespaces=namespaces, resync=300)  # type: ignore[arg-type]

    def _wake(self) -> None:
        self.woken += 1

    async def __aenter__(self) -> "Watching":
        self._task = asyncio.create_task(self.facts.run())
        await settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_snapshot_has_all_that_admission_asks_for() -> None:
    async with Watching(Script()) as watching:
        found = watching.facts.take()
    assert [one.name for one in found.nodes] == ["node-0"]
    assert [(one.name, one.takes) for one in found.gpu_pods] == [("p", {"nvidia.com/gpu": 2.0})]
    priorities = {"another": 7, "usual": 5, "high": 9, "": 5}
    assert (found.priorities, found.default_priority) == (priorities, "usual")
    assert [one.name for one in found.quotas["team-a"]] == ["q"]
    assert found.service_accounts == {"team-a": {"default"}}
    assert found.storage_classes[""] == ("gp3", "ebs.csi.aws.com")
    assert found.storage_classes["efs"] == ("efs", "efs.csi.aws.com")
    assert found.job_classes.by_name["h100"].generation == 2
    assert found.job_classes.enforced_levels == {"team-a": "baseline"}
    assert found.visible


async def test_nothing_is_listed_again_and_an_unchanged_cluster_is_one_snapshot() -> None:
    script = Script()
    async with Watching(script) as watching:
        first, lists = watching.facts.take(), len(script.lists)
        await settled()
        assert watching.facts.take() is first
        assert len(script.lists) == lists == 8


async def test_a_heartbeat_wakes_nobody_and_a_change_does() -> None:
    script = Script()
    async with Watching(script) as watching:
        before, woken = watching.facts.take(), watching.woken
        beat = meta(node(), "node-0", version=2, annotations={"beat": "2"})
        await script.tell("nodes", "MODIFIED", beat)
        await script.tell("pods", "MODIFIED", meta(script.objects["pods"][0], "p", version=2))
        assert (watching.woken, watching.facts.take()) == (woken, before)
        await script.tell("nodes", "MODIFIED", meta(node(unschedulable=True), "node-0", version=3))
        assert watching.woken == woken + 1
        assert not watching.facts.take().nodes[0].usable
        await script.tell("pods", "DELETED", meta(script.objects["pods"][0], "p", version=3))
        assert watching.facts.take().gpu_pods == ()


async def test_where_pods_of_all_namespaces_are_forbidden_those_of_the_watched_are_seen() -> None:
    script = Script()
    script.objects["pods"].append(meta(pod("q", {"nvidia.com/gpu": "1"}), "q", namespace="team-b"))
    script.errors["pods", None] = Forbidden("403", 403)
    async with Watching(script, "team-a") as watching:
        found = watching.facts.take()
    assert not found.visible
    assert [one.name for one in found.gpu_pods] == ["p"]


@pytest.mark.parametrize(
    "resource", [QUOTAS, SERVICE_ACCOUNTS, PRIORITY_CLASSES], ids=lambda one: one.plural
)
async def test_what_is_forbidden_is_unknown_and_keeps_nobody(resource: Any) -> None:
    script = Script()
    script.errors[resource.plural, None] = Forbidden("403", 403)
    async with Watching(script) as watching:
        found = watching.facts.take()
    known = {"resourcequotas": found.quotas, "serviceaccounts": found.service_accounts}
    assert not known.get(resource.plural, found.priorities)


@pytest.mark.parametrize("error", [NotFound("404", 404), Forbidden("403", 403)])
async def test_a_cluster_without_the_definition_of_classes_has_none(error: ClusterError) -> None:
    script = Script()
    script.errors["grpojobclasses", None] = error
    async with Watching(script) as watching:
        found = watching.facts.take().job_classes
    assert found.by_name == {}
    assert found.problem == f"classes can't be seen: {error}"


async def test_nodes_that_are_forbidden_are_a_sentence() -> None:
    script = Script()
    script.errors["nodes", None] = Forbidden("not yours", 403)
    async with Watching(script) as watching:
        assert watching.facts.take().problem == "nodes can't be listed: not yours"


@pytest.mark.parametrize("resource", [NODES, PODS, QUOTAS], ids=lambda one: one.plural)
@pytest.mark.parametrize(
    "error", [Unavailable("503", 503), NotFound("404", 404)], ids=["unavailable", "not found"]
)
async def test_after_any_other_error_nobody_knows_the_cluster(
    resource: Any, error: ClusterError
) -> None:
    script = Script()
    script.errors[resource.plural, None] = error
    async with Watching(script) as watching:
        with pytest.raises(
            Unavailable, match=f"{resource.plural} of all namespaces have not been listed"
        ):
            watching.facts.take()


async def test_what_was_not_heard_of_for_long_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Watching(Script()) as watching:
        watching.facts.take()
        monkeypatch.setattr(facts_module, "DEAF_SECONDS", -1.0)
        with pytest.raises(Unavailable, match="nothing was received about nodes"):
            watching.facts.take()


async def test_an_unreadable_object_is_set_aside_alone() -> None:
    script = Script()
    script.objects["nodes"].append(meta({"spec": {"taints": "none"}}, "odd"))
    async with Watching(script) as watching:
        assert [one.name for one in watching.facts.take().nodes] == ["node-0"]
        assert watching.facts.quarantine.counts() == {"nodes": 1}


@pytest.mark.parametrize("error", [NotFound("404", 404), Forbidden("403", 403)])
async def test_what_can_be_listed_again_is_no_problem_any_more_although_it_is_empty(
    error: ClusterError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts_module, "DEAF_SECONDS", 1000.0)
    script = Script()
    script.objects |= {"grpojobclasses": [], "nodes": []}
    script.errors["grpojobclasses", None] = error
    script.errors["nodes", None] = Forbidden("not yours", 403)
    async with Watching(script) as watching:
        before = watching.facts.take()
        assert before.problem
        assert before.job_classes.problem
        script.errors.clear()
        woken = watching.woken
        await asyncio.sleep(400.0)
        assert watching.woken > woken
        after = watching.facts.take()
    assert (after.problem, after.job_classes.problem) == ("", "")
