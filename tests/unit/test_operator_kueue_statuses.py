"""The status of a Workload: what is read in it, whatever it says, and what is made of it after an
eviction."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.objects.json_reader import Unreadable
from grpo_operator.kueue.workload_manifest import status_without_admission
from grpo_operator.records.workloads import MAX_UPDATES, workload_record
from tests.generated import cases
from tests.unit.kueue_world import admitted, evicted, make_item, make_workload, workload_condition
from tests.unit.operator_world import NOW

ANY = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


def test_what_an_eviction_gives_back() -> None:
    for reason, comes_back in (
        ("Preempted", "True"),
        ("NodeFailures", "True"),
        ("Deactivated", "False"),
    ):
        item = make_item(evicted(reason) | {"requeueState": {"count": 1}})
        before = {one["type"]: one for one in item["status"]["conditions"]}
        found = status_without_admission(item, NOW)
        assert found["admission"] is None
        after = {one["type"]: one for one in found["conditions"]}
        assert {kind: one["status"] for kind, one in after.items()} == {
            "QuotaReserved": "False", "Admitted": "False", "PodsReady": "False",
            "Requeued": comes_back,
            "Evicted": "True",
        }  # fmt: skip
        assert after["Evicted"] == before["Evicted"], "Kueue's own stays as it is"
        assert after["Requeued"]["reason"] == reason
    found = status_without_admission(make_item(evicted("DeactivatedDueToAdmissionCheck")), NOW)
    assert "Deactivated" in [
        one["reason"] for one in found["conditions"] if one["type"] == "Requeued"
    ]


def test_what_others_say_gives_way_where_there_is_no_room() -> None:
    others = [workload_condition(f"example.com/Says{number}") for number in range(13)]
    item = make_item(evicted())
    item["status"]["conditions"] = [*others, *item["status"]["conditions"]]
    found = [one["type"] for one in status_without_admission(item, NOW)["conditions"]]
    assert len(found) == 16
    assert {"QuotaReserved", "Admitted", "Evicted", "PodsReady", "Requeued"} <= set(found)


@settings(max_examples=cases(200))
@given(st.recursive(ANY, lambda below: st.lists(below, max_size=3) | st.dictionaries(
    st.sampled_from(["conditions", "admission", "podSetAssignments", "admissionChecks",
    "podSetUpdates", "name",
                     "flavors", "state", "type", "status"]), below, max_size=4)))  # fmt: skip
def test_a_status_of_any_content_is_read_or_costs_its_workload_alone(status: Any) -> None:
    with contextlib.suppress(Unreadable):
        make_workload(status)


def test_wishes_of_admission_checks_are_bounded() -> None:
    update = {"name": "trainer", "labels": {"a": "x" * MAX_UPDATES}}
    with pytest.raises(ValueError, match="podSetUpdates"):
        workload_record(
            make_item(admitted(admissionChecks=[{"name": "x", "podSetUpdates": [update]}]))
        )
