"""status.export and status.checkpoint: what pods say of the model and the checkpoints, as a user
can use it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.artifacts import MAX_WHERE, parse_sums, sums_text, weights_hash
from grpo_api.status.status import ConditionType, GRPOJobStatus
from grpo_api.text.quantity import MAX_COUNT, format_bytes
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.observation import Observation
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.operator_world import (
    active_status,
    after,
    at,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    said,
    stored,
    terminated,
)

VOLUME = {"checkpoint": {"volume": {"claimName": "team", "subPath": "kept/here"}}}
OWN = {"checkpoint": {"volumeClaimTemplate": {"size": "1Gi"}}}
HASH = f"sha256:{'a' * 64}"


def export(path: str = "/checkpoints/run-uid/export") -> dict[str, Any]:
    return {"to": "Volume", "path": path, "format": "Model", "bytes": 9, "weights_hash": HASH}


def kept(step: int, where: str = "/checkpoints/run-uid/attempt-1/checkpoint") -> dict[str, Any]:
    return {"step": step, "time": 1.7e9, "bytes": 9, "where": where}


def seen(
    *pods: Any, spec: dict[str, Any] = VOLUME, known: dict[str, Any] | None = None, **pull: Any
) -> Observation:
    """A job of two pods with checkpoints on a volume."""
    job = make_job(spec, active_status(**(known or {})))
    told = make_pull(**pull) if pull else None
    return make_seen(job, make_child(), *(pods or (make_pod(0), make_pod(1))), pull=told)


def status(of: Observation) -> GRPOJobStatus:
    """The status that is written, as the API server takes it."""
    return GRPOJobStatus.model_validate(to_json(after(of, judged(of))))


def done(index: int, **more: Any) -> Any:
    return make_pod(index, state=terminated(0, said("Succeeded", rank=index, step=9, **more)))


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (VOLUME, "pvc://team/kept/here/run-uid/export"),
        (OWN, "pvc://run-checkpoints/run-uid/export"),
    ],
)
def test_the_exported_model_is_told_by_claim_and_folder(spec: dict[str, Any], path: str) -> None:
    message = f"trained 9 steps; the model is in {export()['path']}"
    first = done(0, export=export(), checkpoint=kept(8), message=message)
    told = status(seen(first, done(1), spec=spec))
    assert told.phase == "Succeeded"
    succeeded = told.condition(ConditionType.SUCCEEDED)
    assert succeeded is not None
    assert succeeded.message == f"trained 9 steps; the model is in {path}"
    assert told.export is not None
    assert (told.export.path, told.export.bytes, told.export.weights_hash) == (path, 9, HASH)
    assert told.checkpoint is not None
    assert (told.checkpoint.step, told.checkpoint.time) == (8, "2023-11-14T22:13:20Z")
    assert told.outcome is not None
    assert (told.outcome.export, told.outcome.checkpoint) == (None, None), "said once"


def test_what_is_no_folder_on_the_volume_stays_what_it_is() -> None:
    told = status(seen(done(0, export=export("s3://models/x") | {"to": "ObjectStore"}), done(1)))
    assert told.export is not None
    assert told.export.path == "s3://models/x"


@settings(max_examples=cases(60))
@given(
    st.text(
        st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]),
        min_size=1,
        max_size=MAX_WHERE - 13,
    )
)
def test_no_name_is_too_long_for_the_status(below: str) -> None:
    told = status(seen(done(0, export=export(f"/checkpoints/{below}")), done(1)))
    assert told.phase == "Succeeded"
    assert told.export is not None
    assert told.export.path[: MAX_WHERE - 1] == f"pvc://team/kept/here/{below}"[: MAX_WHERE - 1]


@pytest.mark.parametrize(
    "wrong", [{"path": "a\nb"}, {"weights_hash": "md5:0"}, {"bytes": -1}, {"format": "GGUF"}]
)
def test_an_export_that_can_not_be_believed_is_none_and_the_job_has_succeeded(
    wrong: dict[str, Any],
) -> None:
    text = said("Succeeded", step=9, export=export()).replace(*_swapped(wrong))
    pods = (make_pod(0, state=terminated(0, text)), done(1))
    told = status(seen(*pods))
    assert (told.phase, told.export) == ("Succeeded", None)


def _swapped(wrong: dict[str, Any]) -> tuple[str, str]:
    """What of the message to replace, and by what."""
    before = {
        "path": "/checkpoints/run-uid/export",
        "weights_hash": HASH,
        "bytes": '"bytes":9',
        "format": "Model",
    }
    ((field, value),) = wrong.items()
    return before[field], '"bytes":-1' if field == "bytes" else value.replace("\n", "\\n")


def test_the_newest_checkpoint_is_that_of_the_pull_or_of_the_end() -> None:
    running = status(seen(step=7, stage="Training", checkpoint=kept(5)))
    assert running.checkpoint is not None
    assert running.checkpoint.where == "pvc://team/kept/here/run-uid/attempt-1/checkpoint"
    failed = make_pod(0, state=terminated(43, said("BadInput", checkpoint=kept(6))))
    ended = seen(failed, make_pod(1), step=7, stage="Training", checkpoint=kept(5))
    assert judged(ended).action is Action.FAIL
    last = status(ended)
    assert last.checkpoint is not None
    assert (last.checkpoint.step, last.export) == (6, None)


@pytest.mark.parametrize(("stage", "stays"), [("Loading", True), ("Training", False)])
def test_an_attempt_that_trains_without_a_checkpoint_has_none(stage: str, stays: bool) -> None:
    known = {"checkpoint": {"step": 40, "time": at(-99), "bytes": 9, "where": "pvc://team/x"}}
    told = status(seen(known=known, step=1, stage=stage))
    assert (told.checkpoint is not None) is stays
    silent = seen(known=known)
    assert status(silent).checkpoint is not None
    assert (
        status(make_seen(stored(silent.job, told), make_child(), make_pod(0), make_pod(1)))
        is not None
    )


NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=40)


@given(st.dictionaries(NAMES, st.from_regex(r"[0-9a-f]{64}", fullmatch=True), max_size=6))
def test_a_list_of_hashes_is_read_back_and_the_weights_hash_is_of_weights_alone(
    sums: dict[str, str],
) -> None:
    assert parse_sums(sums_text(sums)) == sums
    assert weights_hash({**sums, "config.json": "0" * 64}) == weights_hash(sums)
    assert weights_hash({**sums, "more.safetensors": "0" * 64}) != weights_hash(
        {**sums, "more.safetensors": "1" * 64}
    )


@pytest.mark.parametrize("text", ["x", f"{'0' * 63}  a", f"{'0' * 64} a", f"{'G' * 64}  a"])
def test_what_is_no_list_of_hashes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no line of SHA256SUMS"):
        parse_sums(text)


@given(st.integers(0, MAX_COUNT))
def test_sizes_are_told_with_three_digits(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * scale - size) <= 0.005 * size
