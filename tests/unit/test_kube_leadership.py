"""What one candidate for a Lease does next: takes it, renews it, waits, or has lost it."""

import pytest

from grpo_kube.leader_election import MOST_TRANSITIONS, Leadership, Lease, Terms, Turn
from grpo_kube.objects.errors import NotLeading

TERMS = Terms(10.0)
EMPTY = Lease("1", "", 10, 3, "then", "then")


def held(holder: str, renewed: str = "then", seconds: int = 10, version: str = "1") -> Lease:
    return Lease(version, holder, seconds, 3, "then", renewed)


def standing(lease: Lease | None, now: float = 100.0, identity: str = "me") -> Leadership:
    one = Leadership(identity, TERMS)
    one.record_lease(lease, now)
    return one


def leading(at: float = 100.0) -> Leadership:
    one = standing(EMPTY, at)
    one.record_write(one.proposal(at, "now"), at, at)
    return one


def test_the_terms_are_those_of_the_page() -> None:
    assert (TERMS.duration, TERMS.deadline, TERMS.retry, TERMS.poll) == (10.0, 6.0, 2.0, 1.0)


@pytest.mark.parametrize("lease", [None, EMPTY, held("me")])
def test_a_lease_that_nobody_else_holds_is_taken_at_once(lease: Lease | None) -> None:
    assert standing(lease).step(100.0).turn is Turn.ACQUIRE


def test_one_that_is_held_is_free_once_its_record_has_not_changed_for_its_duration_here() -> None:
    one = standing(held("other", "2099-01-01T00:00:00Z"))
    assert one.step(100.0).seconds == TERMS.poll
    one.record_lease(
        held("other", "2099-01-01T00:00:00Z", version="7"), 105.0
    )  # somebody's label, no renewal
    assert one.step(109.5).seconds == pytest.approx(0.5)
    one.record_lease(held("other", "1970-01-01T00:00:00Z"), 109.9)
    assert one.step(119.8).turn is Turn.WAIT
    assert one.step(119.9).turn is Turn.ACQUIRE


@pytest.mark.parametrize(
    ("promised", "free"), [(-5, 10.0), (0, 10.0), (1, 10.0), (25, 25.0), (2**31 - 1, 60.0)]
)
def test_what_a_lease_promises_is_held_to_bounds(promised: int, free: float) -> None:
    one = standing(held("other", seconds=promised))
    assert one.step(100.0 + free - 0.01).turn is Turn.WAIT
    assert one.step(100.0 + free).turn is Turn.ACQUIRE


def test_a_leader_renews_and_stops_writing_at_its_deadline() -> None:
    one = leading()
    assert one.step(101.9).turn is Turn.WAIT
    assert one.step(102.0).turn is Turn.RENEW
    one.proposal(102.0, "now")  # its answer gets lost
    assert one.step(102.1).turn is Turn.WAIT
    assert one.step(104.0).turn is Turn.RENEW
    assert one.answer_within(105.9) == pytest.approx(4.1)
    assert not one.is_leader(106.0)
    with pytest.raises(NotLeading):
        one.answer_within(106.0)
    lost = one.step(106.0)
    assert (lost.turn, lost.why) == (Turn.LOST, "the Lease was not renewed for 6.0 s")
    one.record_write(one.proposal(106.1, "late"), 106.1, 106.2)
    assert one.step(106.2).turn is Turn.LOST, "what is lost stays lost"


def test_an_answer_counts_from_when_it_was_asked_for() -> None:
    one = leading()
    proposal = one.proposal(102.0, "now")
    one.record_write(proposal, 102.0, 105.5)
    assert one.is_leader(107.9)
    assert not one.is_leader(108.0)


def test_a_leader_that_sees_another_in_its_lease_stops_at_once() -> None:
    one = leading()
    one.record_lease(held("other"), 101.0)
    assert not one.is_leader(101.0)
    assert one.step(101.0).why == "other holds the Lease now"


def test_transitions_count_holders() -> None:
    assert standing(None).proposal(1.0, "now").transitions == 0
    assert standing(EMPTY).proposal(1.0, "now").transitions == 4
    assert standing(held("me")).proposal(1.0, "now") == Lease("1", "me", 10, 3, "then", "now")
    most = Lease("1", "", 10, MOST_TRANSITIONS, "", "")
    assert standing(most).proposal(1.0, "now").transitions == MOST_TRANSITIONS


def test_a_released_lease_names_nobody_and_nothing_is_written_any_more() -> None:
    one = leading()
    released = one.resign("later")
    assert released
    assert "holderIdentity" not in released.spec
    assert released.transitions == 4
    assert not one.is_leader(100.1)
    assert one.resign("again") is None
    assert standing(held("other")).resign("later") is None
