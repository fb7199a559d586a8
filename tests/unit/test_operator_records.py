"""Records of GRPOJobs: an ended one is small and still says everything, to the last field."""

import copy
import sys
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.json_reader import JsonObject
from grpo_operator.records.names import LABEL_ATTEMPT
from grpo_operator.records.packed_job import SHORT
from grpo_operator.records.parsing import grpojob_record, pod_record
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.records.terminations import pod_termination
from tests.generated import cases
from tests.unit.dirty_objects import GRPOJOB, POD, dirty
from tests.unit.operator_world import condition


def ending(item: Any, kind: str, status: str) -> Any:
    """The object with one more condition, as far as it has a status."""
    said = item.get("status")
    known = said.get("conditions") if isinstance(said, dict) else None
    conditions = [*(known if isinstance(known, list) else []), condition(kind, status)]
    return {
        **item,
        "status": {**(said if isinstance(said, dict) else {}), "conditions": conditions},
    }


def read(item: Any) -> GRPOJobRecord | None:
    try:
        return grpojob_record(item)
    except ValueError:
        return None


def judged_spec(spec: Any) -> tuple[GRPOJobSpec | None, tuple[str, ...]]:
    try:
        return parse_spec(spec), ()
    except SpecInvalid as error:
        return None, tuple(error.problems)


@settings(max_examples=cases(50))
@given(dirty(GRPOJOB), st.sampled_from(["Succeeded", "Failed"]), st.sampled_from(["True", "False"]))
def test_what_an_object_says_is_the_same_whether_it_has_ended_or_not(
    item: Any, kind: str, status: str
) -> None:
    if not isinstance(item, dict):
        return
    item = ending(item, kind, status)
    record = read(item)
    if record is None:  # no error of the draw: most dirt can't be read
        return
    assert record.is_finished is (status == "True")
    assert (record.typed is None) is record.is_finished
    assert record.status == GRPOJobStatus.model_validate(item["status"], extra="ignore")
    assert repr(record.raw_status) == repr(item["status"])
    assert (record.phase, record.observed_generation) == (
        record.status.phase or "",
        record.status.observed_generation,
    )
    assert (record.spec, record.problems) == judged_spec(item.get("spec") or {})


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place below a JSON value, as the container and its key."""
    pairs = list(
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [(value, key) for key, _ in pairs] + [
        place for _, part in pairs for place in places(part)
    ]


@settings(max_examples=cases(100))
@given(data=st.data())
def test_a_spec_that_was_typed_before_is_never_taken_for_another(data: st.DataObject) -> None:
    """Neighbours in writing, read one after the other: each says what its types say of it alone."""
    for _ in range(3):
        spec = copy.deepcopy(GRPOJOB["spec"])
        holder, key = data.draw(st.sampled_from(places(spec)))
        holder[key] = data.draw(
            st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, False, "1", "", None, [], {}])
        )
        spec["command"] = (
            ["x" * data.draw(st.sampled_from([0, SHORT]))] if data.draw(st.booleans()) else []
        )
        for _ in range(2):
            record = read({**GRPOJOB, "spec": copy.deepcopy(spec)})
            assume(record is not None)
            assert record is not None
            assert repr((record.spec, record.problems)) == repr(judged_spec(spec))


def test_the_spec_of_a_job_that_comes_again_is_typed_once() -> None:
    status = {**GRPOJOB["status"], "attempt": 7}
    first, second = grpojob_record(GRPOJOB), grpojob_record({**GRPOJOB, "status": status})
    assert second.spec is first.spec
    assert second.status.attempt == 7


def test_an_ended_job_of_fifty_pods_is_kept_in_two_kilobytes() -> None:
    pods = [
        {
            "name": f"run-1-{index}-{7919 * index % 99991:05}",
            "index": index,
            "node": f"node-{index}",
            "phase": "Failed",
        }
        for index in range(50)
    ]
    record = grpojob_record(
        ending({**GRPOJOB, "status": {**GRPOJOB["status"], "pods": pods}}, "Failed", "True")
    )
    assert len(record.status.pods) == 50
    assert sys.getsizeof(record) + sys.getsizeof(record.packed) < 2048


@settings(max_examples=cases(50))
@given(dirty(POD))
def test_what_is_known_of_a_pods_end_is_kept_to_the_last_field(item: Any) -> None:
    try:
        record = pod_record(item)
    except ValueError:
        return
    whole = JsonObject(item)
    attempt = whole.part("metadata").part("labels").digits(LABEL_ATTEMPT)
    assert record.termination == pod_termination(whole.part("status"), attempt, record.node)
