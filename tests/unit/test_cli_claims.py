"""Pods that the command line makes, beside who has their claims: a volume of one node is mounted
where it is."""

from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.cluster import kubectl
from grpo_cli.cluster.claims import Holder, pin_to_claims, pin_to_holder
from grpo_cli.cluster.delivery import Delivery
from grpo_cli.cluster.job_pods import waiting_message
from grpo_cli.show.errors import KubectlError, NotYet
from tests.generated import cases
from tests.stepped_clock import SteppedClock

OPTIONS = Namespace(context=None, namespace="team", timeout=600)
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
NAMES = ("models", "kept", "hub")
ONE, MANY = ["ReadWriteOnce"], ["ReadWriteMany"]
MODES: tuple[list[str], ...] = (ONE, MANY, ["ReadOnlyMany"], [*ONE, "ReadOnlyMany"], [])


def volumes(names: Any) -> list[dict[str, Any]]:
    return [
        {"name": "scratch", "emptyDir": {}},
        *({"persistentVolumeClaim": {"claimName": one}} for one in names),
    ]


def job(*names: str) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"volumes": volumes(names)}}}}


def claim(name: str, modes: list[str], bound: bool = True) -> dict[str, Any]:
    told = {"accessModes": modes}
    return {
        "metadata": {"name": name},
        "spec": {} if bound else told,
        "status": told if bound else {},
    }


def pod(name: str, node: str, names: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": node, "volumes": volumes(names), "tolerations": [GPU]},
    }


class Cluster:
    """What kubectl would say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **items: Any) -> None:
        self.items, self.asked = items, list[str]()
        monkeypatch.setattr(kubectl, "get_json", self.get)

    def get(self, _: Namespace, kind: str, *_more: str) -> dict[str, Any]:
        self.asked.append(kind)
        found = self.items.get(kind, [])
        if isinstance(found, Exception):
            raise found
        return {"items": found}


def node_of(made: dict[str, Any]) -> list[str]:
    """The nodes that the pod's required affinity names."""
    affinity = made["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms", []
    )
    return [value for term in terms for field in term["matchFields"] for value in field["values"]]


@settings(max_examples=cases(200))
@given(
    modes=st.fixed_dictionaries({name: st.sampled_from(MODES) for name in NAMES}),
    wanted=st.sets(st.sampled_from(NAMES)),
    others=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sets(st.sampled_from(NAMES))), max_size=4
    ),
    bound=st.booleans(),
)
def test_a_pod_goes_where_its_claims_are_and_only_if_they_can_be_had_there(
    modes: dict[str, list[str]], wanted: set[str], others: list[tuple[str, set[str]]], bound: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        there = [claim(name, found, bound) for name, found in modes.items()]
        Cluster(
            patch,
            persistentvolumeclaims=there,
            pods=[pod(f"pod-{number}", node, names) for number, (node, names) in enumerate(others)],
        )
        single = {name for name in wanted if modes[name] == ONE}
        # a claim of one node is on one: which of the generated pods has it is the last one's say
        where = {name: node for node, names in others for name in names & single}
        if len(set(where.values())) == 2:
            with pytest.raises(NotYet, match="no node can mount both claim"):
                pin_to_claims(OPTIONS, job(*wanted))
            return
        made, holder = pin_to_claims(OPTIONS, job(*wanted))
        assert node_of(made) == sorted(set(where.values()))
        assert (holder is None) == (not where)
        if holder:
            assert made["spec"]["template"]["spec"]["tolerations"] == [GPU]
            assert holder.claim in single


def test_the_nodes_that_a_user_names_stay_named_and_nothing_given_is_changed() -> None:
    labels = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [labels]}
        }
    }
    given_pod = {"affinity": affinity, "tolerations": [GPU], "volumes": []}
    made = pin_to_holder(
        given_pod, Holder("kept", "run-1-0", "node-1", (GPU, {"key": "mine", "operator": "Exists"}))
    )
    (term,) = made["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    name = {"key": "metadata.name", "operator": "In", "values": ["node-1"]}
    assert term == {**labels, "matchFields": [name]}
    assert made["tolerations"] == [GPU, {"key": "mine", "operator": "Exists"}]
    assert "matchFields" not in labels


def test_a_claim_of_one_pod_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [claim("kept", ["ReadWriteOncePod"])]
    Cluster(monkeypatch, persistentvolumeclaims=there, pods=[pod("run-1-0", "a", ["kept"])])
    with pytest.raises(
        NotYet,
        match="one pod at a time can mount claim kept, which pod run-1-0 has on node a: wait",
    ):
        pin_to_claims(OPTIONS, job("kept"))


def test_who_may_not_look_places_nothing_and_shared_claims_ask_for_no_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denied = Cluster(
        monkeypatch, persistentvolumeclaims=KubectlError("Error from server (Forbidden): no")
    )
    assert pin_to_claims(OPTIONS, job("kept")) == (job("kept"), None)
    denied.items["persistentvolumeclaims"] = KubectlError("the server is gone")
    with pytest.raises(KubectlError, match="is gone"):
        pin_to_claims(OPTIONS, job("kept"))
    shared = Cluster(monkeypatch, persistentvolumeclaims=[claim("kept", ["ReadWriteMany"])])
    assert pin_to_claims(OPTIONS, job("kept")) == (job("kept"), None)
    assert shared.asked == ["persistentvolumeclaims"]
    none = Cluster(monkeypatch)
    assert pin_to_claims(OPTIONS, job()) == (job(), None)
    assert none.asked == []


def test_a_pod_that_waits_too_long_says_what_the_kubelet_says_and_beside_whom_it_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubectl, "create_object", lambda *_: "run-export-x")
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    events = [
        {
            "lastTimestamp": "2026-01-01T00:00:09Z",
            "reason": "FailedAttachVolume",
            "message": "Multi-Attach error",
        },
        {"lastTimestamp": "2026-01-01T00:00:01Z", "reason": "Failed", "message": "older"},
        {},
    ]
    mine = {
        "metadata": {"name": "p"},
        "status": {"phase": "Pending", "containerStatuses": [waiting]},
    }
    cluster = Cluster(monkeypatch, pods=[mine], events=events)
    with pytest.raises(
        KubectlError, match=r"does not run after 600 s: FailedAttachVolume: Multi-Attach error$"
    ):
        Delivery(OPTIONS, {}, clock=SteppedClock()).wait_for_listing()
    holder = Holder("kept", "run-1-0", "node-1")
    unbound = {"status": "False", "reason": "Unschedulable", "message": "no room"}
    mine["status"] = {"phase": "Pending", "conditions": [unbound]}
    told = (
        "Unschedulable: no room; it can run only beside claim kept, which pod run-1-0 has on "
        "node node-1"
    )
    with pytest.raises(KubectlError, match=f"{told}$"):
        Delivery(OPTIONS, {}, holder, SteppedClock()).wait_for_listing()
    mine["status"] = {"phase": "Pending"}
    cluster.items["events"] = KubectlError("(Forbidden)")
    with pytest.raises(KubectlError, match=r"does not run after 600 s: $"):
        Delivery(OPTIONS, {}, holder, SteppedClock()).wait_for_listing()


def test_a_job_whose_pod_a_quota_denies_says_so_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kubectl, "create_object", lambda *_: "run-export-x")
    denied = {"reason": "FailedCreate", "message": "pods is forbidden: exceeded quota: small"}
    Cluster(monkeypatch, pods=[], events=[denied])
    quota = "FailedCreate: pods is forbidden: exceeded quota: small"
    with pytest.raises(KubectlError, match=f"does not run after 600 s: {quota}$"):
        Delivery(OPTIONS, {}, clock=SteppedClock()).wait_for_listing()
    assert capsys.readouterr().err == f"waiting for the pod of run-export-x: {quota}\n"
    assert waiting_message(OPTIONS, "run-check", []) == quota
