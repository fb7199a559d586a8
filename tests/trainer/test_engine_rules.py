"""Which engine gets which prompt, and what follows when one is lost: any order of events, and none
is used wrongly."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from grpo_trainer.engine_pod.messages import Completion, GeneratedCompletions
from grpo_trainer.engine_pod.served_version import RequestRefused, ServedWeights
from grpo_trainer.generation.dispatch import PromptAssignment
from grpo_trainer.generation.engine_client import EngineUnreachable
from grpo_trainer.generation.fleet import MAX_STRIKES, Engine, EngineView, engines_message
from grpo_trainer.generation.remote_engines import EnginesMain
from grpo_trainer.generation.sync_pass import Verdict


@given(st.lists(st.floats(), max_size=4))
def test_log_probabilities_that_are_no_numbers_reach_rank_0(logprobs: list[float]) -> None:
    completion = Completion(tokens=[1] * len(logprobs), logprobs=logprobs)
    answer = GeneratedCompletions(version=1, incarnation="a", completions=[completion])
    received = GeneratedCompletions.model_validate_json(answer.model_dump_json())
    assert repr(received) == repr(answer)


class Dividing(RuleBasedStateMachine):
    """Prompts on their way, while engines come, answer and are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.division = PromptAssignment(range(12), 3)
        self.held: list[tuple[int, int]] = []
        self.answered: list[int] = []
        self.unsettled: list[tuple[int, int]] = []

    @rule(engines=st.sets(st.integers(0, 3)))
    def assign(self, engines: set[int]) -> None:
        given_out = self.division.assign(sorted(engines))
        assert {engine for engine, _ in given_out} <= engines
        self.held += given_out

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        engine, prompt = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.division.record_answer(engine, prompt)
        self.answered.append(prompt)
        self.unsettled.append((engine, prompt))

    @rule(engine=st.integers(0, 3))
    def settle(self, engine: int) -> None:
        self.division.record_proof(engine)
        self.unsettled = [(one, prompt) for one, prompt in self.unsettled if one != engine]

    @rule(engine=st.integers(0, 3))
    def lose(self, engine: int) -> None:
        again = [prompt for one, prompt in self.held + self.unsettled if one == engine]
        assert self.division.take_back(engine) == sorted(again)
        self.held = [(one, prompt) for one, prompt in self.held if one != engine]
        self.unsettled = [(one, prompt) for one, prompt in self.unsettled if one != engine]
        self.answered = [prompt for prompt in self.answered if prompt not in again]

    @invariant()
    def each_prompt_is_in_one_place(self) -> None:
        out = [prompt for _, prompt in self.held] + self.answered
        assert len(out) == len(set(out))
        assert all(len(held) <= 3 for held in self.division.prompts_by_engine.values())
        assert self.division.is_done == (len(self.answered) == 12)
        assert set(self.division.unproven_engines) == {engine for engine, _ in self.unsettled}

    def teardown(self) -> None:
        """Whatever happened, one engine that lives brings all to an end."""
        for engine in range(4):
            self.lose(engine)
        assert not self.division.unproven_engines
        while given_out := self.division.assign([9]):
            for engine, prompt in given_out:
                self.division.record_answer(engine, prompt)
                self.answered.append(prompt)
        assert sorted(self.answered) == list(range(12))


test_dividing = Dividing.TestCase


def record_verdict(verdict: Verdict) -> None:
    """As rank 0 does after a pass."""
    main: Any = None  # a verdict concerns its engine alone
    EnginesMain._record_verdict(main, verdict)


class Knowing(RuleBasedStateMachine):
    """An engine as rank 0 knows it; a failure may be of any process that the pod has had."""

    def __init__(self) -> None:
        super().__init__()
        client: Any = None
        self.engine = Engine(EngineView(0, "here"), client)
        self.view = self.engine.view
        self.present = ""
        self.last = ""
        self.proof: tuple[str, int] | None = None
        self.given_up = ""
        self.replaced: set[str] = set()
        self.strikes = 0
        self.losses = 0
        self.is_counted = False

    def lose(self, *, counts: bool) -> None:
        if (counts or self.proof) and not self.is_counted:
            self.losses, self.is_counted = self.losses + 1, True
        self.proof = None

    @rule(incarnation=st.sampled_from("abc"))
    def seen(self, incarnation: str) -> None:
        if incarnation != self.present:
            self.lose(counts=False)
        if incarnation not in ("", self.last, *self.replaced):
            self.replaced |= {self.last} - {""}
            self.last, self.strikes, self.is_counted = incarnation, 0, False
        self.present = incarnation
        self.view.record_answer(incarnation)

    @rule()
    def gone(self) -> None:
        self.view.record_absence("gone")
        self.lose(counts=False)
        self.present = ""

    @rule()
    def stale(self) -> None:
        self.view.record_lost_weights("stale")
        self.lose(counts=False)

    @precondition(lambda self: self.view.is_usable)
    @rule(version=st.integers(1, 3))
    def proven(self, version: int) -> None:
        self.view.record_proof(version)
        self.proof, self.strikes, self.is_counted = (self.present, version), 0, False

    @precondition(lambda self: self.last)
    @rule(incarnation=st.sampled_from("abc"), is_timeout=st.booleans(), is_verdict=st.booleans())
    def failed(self, incarnation: str, *, is_timeout: bool, is_verdict: bool) -> None:
        error = EngineUnreachable("failed", is_timeout=is_timeout)
        if is_verdict:
            verdict = Verdict(self.engine, incarnation, str(error), is_gone=error.is_gone)
            record_verdict(verdict)
        else:
            self.engine.record_failure(error, incarnation)
        if incarnation == self.last and is_timeout:
            self.strikes += 1
            self.lose(counts=self.strikes >= MAX_STRIKES)
            self.given_up = self.last if self.strikes >= MAX_STRIKES else self.given_up
        elif incarnation == self.last:
            self.lose(counts=False)
            self.present = ""

    @rule(incarnation=st.sampled_from("abc"))
    def blocked(self, incarnation: str) -> None:
        record_verdict(Verdict(self.engine, incarnation, "blocked", is_blocked=True))
        if incarnation == self.last:
            self.lose(counts=True)
            self.given_up = self.last

    @invariant()
    def it_serves_what_this_process_was_proven_to_have(self) -> None:
        for version in (1, 2, 3):
            assert self.view.is_serving(version) == (self.proof == (self.present, version))
        must_end = {self.given_up, *self.replaced} - {""}
        assert self.view.is_condemned == (self.present in must_end)
        assert self.view.is_usable == (self.present not in {"", *must_end})
        assert (self.view.strikes, self.view.losses) == (self.strikes, self.losses)
        assert self.view.last_message in engines_message([self.view])


test_knowing = Knowing.TestCase


def test_a_process_that_is_given_up_is_one_loss() -> None:
    view = EngineView(0, "here")
    view.record_answer("a")
    view.record_proof(1)
    for _ in range(MAX_STRIKES):
        view.record_failure("failed")
    assert (view.is_condemned, view.losses) == (True, 1)
    view.record_answer("b")
    view.give_up("stalled")
    assert view.losses == 2


def test_a_process_that_comes_back_is_the_same_loss_with_the_same_strikes() -> None:
    view = EngineView(0, "here")
    view.record_answer("a")
    view.record_proof(1)
    for _ in range(MAX_STRIKES):
        view.record_failure("failed")
        view.record_absence("does not answer")
        view.record_answer("a")
    assert (view.is_condemned, view.losses) == (True, 1)


class Serving(RuleBasedStateMachine):
    """The engine's own side."""

    def __init__(self) -> None:
        super().__init__()
        self.served = ServedWeights("me")
        self.serves: int | None = None
        self.admitted: int | None = None

    @rule(version=st.integers(1, 3), ends=st.booleans())
    def sync(self, version: int, ends: bool) -> None:
        self.served.begin_sync()
        self.serves, self.admitted = None, None
        with pytest.raises(RequestRefused, match="under way"):
            self.served.begin_sync()
        if ends:
            self.served.record_received(version)
        else:
            self.served.record_failure()

    @rule(version=st.integers(1, 3))
    def confirm(self, version: int) -> None:
        try:
            self.served.confirm(version)
        except RequestRefused:
            return
        self.serves = version

    @rule(version=st.integers(1, 3), incarnation=st.sampled_from(["me", "other"]))
    def admit(self, version: int, incarnation: str) -> None:
        if (version, incarnation) == (self.serves, "me"):
            self.admitted = self.served.admit(version, incarnation)
        else:
            with pytest.raises(RequestRefused):
                self.served.admit(version, incarnation)

    @invariant()
    def it_tells_what_it_serves(self) -> None:
        assert self.served.version == self.serves == self.served.state().version
        if self.admitted is not None:
            self.served.require_no_sync_since(self.admitted)


test_serving = Serving.TestCase


@pytest.mark.parametrize("end", ["confirmed", "failed", "under way"])
def test_a_completion_during_which_a_sync_began_is_not_handed_out(end: str) -> None:
    served = ServedWeights()
    served.begin_sync()
    served.record_received(3)
    served.confirm(3)
    admitted = served.admit(3, served.incarnation)
    served.begin_sync()
    if end == "confirmed":
        served.record_received(3)
        served.confirm(3)
    elif end == "failed":
        served.record_failure()
    with pytest.raises(RequestRefused, match="while the completion was sampled"):
        served.require_no_sync_since(admitted)
