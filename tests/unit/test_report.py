"""What a trainer says back: an Outcome survives the kubelet, which keeps 4096 bytes of it, whatever its message is made
of; causes come before symptoms; a phase of a step is not a phase of a job.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.artifacts import Checkpoint, Export, weights_hash
from grpo_api.causes import Tier, tier
from grpo_api.contract import TERMINATION_BYTES
from grpo_api.metrics import JOB_PHASE, JOBS, OPERATOR
from grpo_api.plan import MemoryPhases
from grpo_api.quantity import MAX_COUNT
from grpo_api.report import LOAD, MESSAGE_CHARACTERS, STEP_PHASES, Outcome, Result, with_message
from grpo_api.timing import LAST_TIME
from grpo_api.training_metrics import OUTCOME_KEYS, TRAINER

COUNTS = st.integers(min_value=0, max_value=MAX_COUNT)
KEYS = st.sampled_from(OUTCOME_KEYS) | st.from_regex(r"[a-z0-9_]{32}", fullmatch=True)
NUMBERS = st.floats()
CHARACTERS = st.characters(codec=None) | st.sampled_from('"\\\n\x00\x7f […]ü語😀\ud800')
"""Any character: what JSON escapes, what takes one to four bytes, and halves of pairs that have no UTF-8 at all."""
PARTS = st.tuples(st.text(CHARACTERS, max_size=40), st.integers(min_value=1, max_value=3000))
PATHS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=300)
OUTCOMES = st.builds(
    Outcome,
    result=st.sampled_from(Result),
    rank=COUNTS,
    step=COUNTS,
    total_steps=COUNTS,
    attempt=COUNTS,
    metrics=st.dictionaries(KEYS, NUMBERS, max_size=16),
    export=st.none()
    | st.builds(
        Export,
        to=st.sampled_from(["Volume", "ObjectStore", "Hub"]),
        path=PATHS,
        format=st.sampled_from(["Model", "Adapter"]),
        bytes=COUNTS,
        weightsHash=st.just(weights_hash({})),  # builds goes by the alias
    ),
    checkpoint=st.none() | st.builds(Checkpoint, step=COUNTS, time=st.floats(0, LAST_TIME), bytes=COUNTS, where=PATHS),
)


@given(OUTCOMES, st.lists(PARTS, max_size=4))
def test_any_outcome_fits_and_is_read_back(outcome: Outcome, parts: list[tuple[str, int]]) -> None:
    message = "".join(text * times for text, times in parts)
    said = with_message(outcome, message).model_dump_json().encode()
    assert len(said) <= TERMINATION_BYTES
    read = Outcome.model_validate_json(said)
    assert read.model_copy(update={"message": ""}).model_dump_json() == outcome.model_dump_json()
    if len(outcome.model_dump_json().encode()) + 6 * len(message) <= TERMINATION_BYTES:
        assert read.message == message.encode(errors="replace").decode()


@pytest.mark.parametrize("filling", ["a", '"', "ü", "\x01", "😀"])
def test_a_long_message_keeps_both_ends_and_uses_the_room(filling: str) -> None:
    outcome = with_message(Outcome(result=Result.ERROR), "begin " + filling * 9000 + " end")
    size = len(outcome.model_dump_json().encode())
    assert outcome.message.startswith("begin ")
    assert outcome.message.endswith(" end")
    assert size > TERMINATION_BYTES - 20 or len(outcome.message) > MESSAGE_CHARACTERS - 3


def test_the_plan_predicts_memory_for_phases_that_the_trainer_measures() -> None:
    assert set(MemoryPhases.model_fields) == {LOAD, *STEP_PHASES} - {"reward"}


def test_what_a_lost_peer_says_is_never_blamed_before_what_can_have_caused_it() -> None:
    causes = {tier(result) for result in (Result.BAD_INPUT, Result.OUT_OF_MEMORY, Result.REWARD_ERROR)}
    symptoms = {tier(result) for result in (Result.ERROR, Result.RENDEZVOUS_TIMEOUT, Result.PREEMPTED, Result.HANG)}
    assert max(causes) < tier(Result.PREEMPTED, disrupted=True) < min(symptoms)
    assert tier(Result.OUT_OF_MEMORY, disrupted=True) is Tier.SPECIFIC
    assert tier(Result.BAD_INPUT, reported=False) is Tier.ERROR


def test_the_label_phase_is_the_job_s_alone() -> None:
    assert [metric.name for metric in (*TRAINER, *OPERATOR) if "phase" in metric.labels] == [
        JOBS.name,
        JOB_PHASE.name,
    ]
