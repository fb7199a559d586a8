"""What a trainer says back: an Outcome survives the kubelet, which keeps 4096 bytes of it, whatever
its message is made of; causes come before symptoms; a phase of a step is not a phase of a job.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import MemoryPhases
from grpo_api.report.artifacts import Checkpoint, Export, weights_hash
from grpo_api.report.metrics import JOB_PHASE, JOBS, OPERATOR
from grpo_api.report.report import (
    LOAD,
    MESSAGE_CHARACTERS,
    STEP_PHASES,
    MemoryShortage,
    Outcome,
    Result,
)
from grpo_api.report.revisions import DATASET_FINGERPRINT, Generations
from grpo_api.report.root_cause import LOST_PEER_MESSAGE, CausePriority, cause_priority
from grpo_api.report.termination_message import MESSAGE_BYTES, truncate_to_fit
from grpo_api.report.training_metrics import OUTCOME_KEYS, TRAINER
from grpo_api.text.contract import TERMINATION_BYTES
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.timing import LAST_TIME, Account, Clock
from tests.generated import cases

COUNTS = st.integers(min_value=0, max_value=MAX_COUNT)
KEYS = st.sampled_from(OUTCOME_KEYS) | st.from_regex(r"[a-z0-9_]{32}", fullmatch=True)
NUMBERS = st.floats()
CHARACTERS = st.characters(codec=None) | st.sampled_from('"\\\n\x00\x7f […]ü語😀\ud800')
"""Any character: what JSON escapes, what takes one to four bytes, and halves of pairs that have no
UTF-8 at all."""
PARTS = st.tuples(st.text(CHARACTERS, max_size=40), st.integers(min_value=1, max_value=3000))
PATHS = st.text(
    st.characters(min_codepoint=33, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8
).flatmap(lambda part: st.integers(1, 128).map(lambda times: part * times))
"""As long as a path may be, of characters of one to four bytes."""
REVISIONS = st.dictionaries(
    st.sampled_from(["model", "dataset"])
    | st.integers(0, 999).map("rewards[{}].model".format)
    | st.from_regex(r"[a-z]{64}", fullmatch=True),
    st.sampled_from(["a" * 40, "f" * 64]),
    max_size=39,
).flatmap(lambda found: st.sampled_from([found, {DATASET_FINGERPRINT: "d" * 64, **found}]))
SECONDS = st.floats(0, LAST_TIME)
CLOCKS = st.builds(
    Clock, loading=SECONDS, proving=SECONDS, generating=SECONDS, training=SECONDS, saving=SECONDS
)
OUTCOMES = st.builds(
    Outcome,
    result=st.sampled_from(Result),
    rank=COUNTS,
    step=COUNTS,
    total_steps=COUNTS,
    attempt=COUNTS,
    diverged_on=st.none() | COUNTS.map(lambda count: Generations(first=count, last=count)),
    shortage=st.none()
    | st.builds(MemoryShortage, phase=st.sampled_from(STEP_PHASES), requested_bytes=COUNTS),
    checkpoint_step=st.none() | COUNTS,
    metrics=st.dictionaries(KEYS, NUMBERS, max_size=16),
    revisions=REVISIONS,
    account=st.none() | st.builds(Account, clock=CLOCKS, sealed=CLOCKS),
    export=st.none()
    | st.builds(
        Export,
        to=st.sampled_from(["Volume", "ObjectStore", "Hub"]),
        path=PATHS,
        format=st.sampled_from(["Model", "Adapter"]),
        bytes=COUNTS,
        weightsHash=st.just(weights_hash({})),  # builds goes by the alias
    ),
    checkpoint=st.none()
    | st.builds(Checkpoint, step=COUNTS, time=st.floats(0, LAST_TIME), bytes=COUNTS, where=PATHS),
)


STAYS = {
    "result",
    "rank",
    "step",
    "total_steps",
    "attempt",
    "diverged_on",
    "shortage",
    "checkpoint_step",
}
"""What tells how the attempt ended."""


@settings(max_examples=cases(300, gate=37))
@given(OUTCOMES, st.lists(PARTS, max_size=4))
def test_any_outcome_fits_and_is_read_back(outcome: Outcome, parts: list[tuple[str, int]]) -> None:
    message = "".join(text * times for text, times in parts)
    told = truncate_to_fit(outcome, message)
    said = told.model_dump_json().encode()
    assert len(said) <= TERMINATION_BYTES
    read = Outcome.model_validate_json(said)
    assert read.model_dump_json() == told.model_dump_json()
    assert read.model_dump(include=STAYS) == outcome.model_dump(include=STAYS)
    alone = outcome.model_copy(update={"message": ""})
    if len(alone.model_dump_json().encode()) + 6 * len(message) <= TERMINATION_BYTES:
        assert read.message == message.encode(errors="replace").decode()
    if len(alone.model_dump_json().encode()) <= TERMINATION_BYTES - MESSAGE_BYTES:
        assert read.model_copy(update={"message": ""}).model_dump_json() == alone.model_dump_json()
    no_message = told.model_copy(update={"message": ""}).model_dump_json()
    assert len(no_message.encode()) <= TERMINATION_BYTES - min(
        MESSAGE_BYTES, len(said) - len(no_message.encode())
    )


@settings(max_examples=cases(200, gate=25))
@given(OUTCOMES, st.sampled_from(["", "a" * 4000]))
def test_what_matters_least_is_left_out_first(outcome: Outcome, message: str) -> None:
    told = truncate_to_fit(outcome, message)
    assert told.revisions.items() <= outcome.revisions.items()
    assert told.metrics.items() <= outcome.metrics.items() or "nan" in str(outcome.metrics.values())
    assert list(told.metrics) == list(outcome.metrics)[: len(told.metrics)]
    named = [key for key in ("model", "dataset", DATASET_FINGERPRINT) if key in outcome.revisions]
    assert set(named[: len(told.revisions)]) <= told.revisions.keys()
    lost = [len(told.revisions) < len(outcome.revisions), len(told.metrics) < len(outcome.metrics)]
    kept = [bool(told.revisions), bool(told.metrics)]
    for field in ("account", "checkpoint", "export"):
        before, now = getattr(outcome, field), getattr(told, field)
        assert now in (None, before)
        lost.append(now != before)
        kept.append(now is not None)
    for position, missing in enumerate(lost):
        assert not (missing and any(kept[:position])), "something of less worth was kept"


def test_forty_commits_leave_room_for_what_happened_and_where_the_model_is() -> None:
    revisions = {f"rewards[{number}].model": "a" * 40 for number in range(38)} | {
        "dataset": "b" * 40,
        "model": "c" * 40,
    }
    export = Export(
        to="Volume",
        path="/checkpoints/" + "ü" * 300,
        format="Model",
        bytes=9,
        weights_hash=weights_hash({}),
    )
    metrics = dict.fromkeys(OUTCOME_KEYS, 0.123456789012345)
    outcome = Outcome(result=Result.SUCCEEDED, metrics=metrics, revisions=revisions, export=export)
    told = truncate_to_fit(outcome, "trained " * 400)
    assert (told.export, told.metrics) == (export, metrics)
    assert {"model", "dataset"} <= told.revisions.keys()
    assert len(told.message) > 900


@pytest.mark.parametrize("filling", ["a", '"', "ü", "\x01", "😀"])
def test_a_long_message_keeps_both_ends_and_uses_the_room(filling: str) -> None:
    outcome = truncate_to_fit(Outcome(result=Result.ERROR), "begin " + filling * 9000 + " end")
    size = len(outcome.model_dump_json().encode())
    assert outcome.message.startswith("begin ")
    assert outcome.message.endswith(" end")
    assert size > TERMINATION_BYTES - 20 or len(outcome.message) > MESSAGE_CHARACTERS - 3


def test_the_plan_predicts_memory_for_phases_that_the_trainer_measures() -> None:
    assert set(MemoryPhases.model_fields) == {LOAD, *STEP_PHASES} - {"reward"}


def test_what_a_lost_peer_says_is_never_blamed_before_what_can_have_caused_it() -> None:
    causes = {
        cause_priority(result)
        for result in (Result.BAD_INPUT, Result.OUT_OF_MEMORY, Result.REWARD_ERROR)
    }
    symptoms = {
        cause_priority(result)
        for result in (Result.ERROR, Result.RENDEZVOUS_TIMEOUT, Result.PREEMPTED, Result.HANG)
    }
    assert max(causes) < cause_priority(Result.PREEMPTED, disrupted=True) < min(symptoms)
    assert cause_priority(Result.OUT_OF_MEMORY, disrupted=True) is CausePriority.SPECIFIC
    assert cause_priority(Result.BAD_INPUT, reported=False) is CausePriority.ERROR
    lost = cause_priority(Result.ERROR, f"Training: {LOST_PEER_MESSAGE}, which probably failed")
    assert cause_priority(Result.ERROR, "Training: KeyError: 'kl'") < lost
    assert cause_priority(Result.RENDEZVOUS_TIMEOUT) < lost < cause_priority(Result.PREEMPTED)


def test_the_label_phase_is_the_job_s_alone() -> None:
    assert [metric.name for metric in (*TRAINER, *OPERATOR) if "phase" in metric.labels] == [
        JOBS.name,
        JOB_PHASE.name,
    ]
