"""Engines that never come, and engines that never come back: what the job says meanwhile, and how
the attempt ends."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.objects.json_reader import Unreadable
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.loop.progress import targets
from grpo_operator.records.names import COMPONENT_ENGINE, COMPONENT_TRAINER
from grpo_operator.records.parsing import job_record
from grpo_operator.records.records import JobRecord
from tests.generated import cases
from tests.unit.kueue_world import QUEUED
from tests.unit.operator_world import (
    KILLED,
    LIMITS,
    NOW,
    PLAN,
    SERVED_PLAN,
    TRAINERS,
    Thing,
    active_status,
    after,
    condition,
    judged,
    make_child,
    make_engine,
    make_engines,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
    said,
    stored,
    terminated,
)
from tests.unit.test_operator_provisioning import DECLARED
from tests.unit.test_operator_slow_ends import SlowEnds
from tests.unit.test_operator_writes import check
from tests.unit.write_world import STEP, owner
from tests.virtual_time import virtually

NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
PULLED = make_engine(1, state=NO_IMAGE, phase="Pending")


def seen_of(
    *things: Thing, stage: str = "Training", ran: bool = True, bound: float = -60
) -> Observation:
    """What is seen of two training pods, whose rank 0 is at that stage, beside these."""
    status = active_status(plan=SERVED_PLAN, running=ran)
    status["conditions"].append(condition("Scheduled", since=bound))
    return make_seen(
        make_job(status=status), *TRAINERS, *things, pull=make_pull(step=0, stage=stage)
    )


def degraded(seen: Observation) -> tuple[str, str, str]:
    return of_type(after(seen, judged(seen)), "Degraded")


@pytest.mark.parametrize("ran", [False, True])
def test_an_unreadable_spec_says_that_it_keeps_the_engines_from_being_created(ran: bool) -> None:
    job = make_job({"later": {"engine": "Newer"}}, active_status(plan=SERVED_PLAN, running=ran))
    seen = make_seen(job, *TRAINERS)
    assert judged(seen).action is Action.WAIT
    status, reason, message = degraded(seen)
    assert (status, reason) == ("True", "InvalidSpec")
    assert "the Job of attempt 1's engines can't be created" in message
    assert "spec.later: unknown field" in message
    whole = make_seen(job, *TRAINERS, make_engines(), make_engine(0), make_engine(1))
    assert judged(whole) == Decision(Action.WAIT)


def test_while_an_engines_image_is_pulled_the_job_starts_and_says_what_it_waits_for() -> None:
    seen = seen_of(make_engines(), make_engine(0), PULLED, stage="Loading", ran=False)
    status = after(seen, judged(seen))
    assert status.phase == "Starting"
    assert of_type(status, "Degraded")[1:] == (
        "PodWaiting", f"pod {PULLED.name} waits: ImagePullBackOff: no such image"
    )  # fmt: skip


def test_an_engine_that_never_comes_releases_a_gang_that_waits_for_it() -> None:
    seen = seen_of(make_engines(), make_engine(0), PULLED, stage="Loading", ran=False, bound=-9999)
    assert judged(seen).action is Action.RELEASE


@pytest.mark.parametrize("stage", ["Training", "Saving", "Exporting"])
def test_a_gang_that_has_begun_without_an_engine_runs_and_is_not_released(stage: str) -> None:
    """The trainer waits for engines as long as guard.rendezvousTimeoutSeconds, and begins with
    those that came."""
    seen = seen_of(make_engines(), make_engine(0), PULLED, stage=stage, ran=False, bound=-9999)
    decision = judged(seen)
    assert decision.action is Action.WAIT
    status = after(seen, decision)
    assert (status.phase, of_type(status, "Running")[2]) == (
        "Running",
        "attempt 1 runs with 2 pods and 1 of 2 engines",
    )
    assert of_type(status, "Degraded") == (
        "True",
        "EnginesLost",
        "1 of 2 engines run: engine 1 waits: ImagePullBackOff: no such image; the others are made "
        "again by their "
        "index, and training goes on with those that are proven to have its weights",
    )


def test_rank_0_is_asked_before_all_engines_run_and_without_engines_only_of_a_gang_that_runs() -> (
    None
):
    for plan, running, count in ((SERVED_PLAN, False, 1), (PLAN, False, 0), (PLAN, True, 1)):
        job = make_job(status=active_status(plan=plan, running=running))
        found = list(targets([job], lambda _: [make_pod(0), make_pod(1), make_engine(0)]))
        assert [(one.uid, one.job_uid, one.attempt) for one in found] == [
            ("pod-1-0", job.uid, 1)
        ] * count


def test_an_engine_that_used_up_its_retries_is_said_to_stay_away() -> None:
    things = (make_engines(spent="1"), make_engine(0), make_engine(1, state=KILLED))
    held, reason, message = degraded(seen_of(*things))
    assert (held, reason) == ("True", "EnginesLost")
    assert message == (
        "1 of 2 engines run: engine 1 ended with OOMKilled, exit code 137; this attempt does "
        "without engine 1, which "
        "used up all retries; training goes on with those that are proven to have its weights"
    )


ALL_GONE: tuple[Thing, ...] = (make_engine(0, state=KILLED), make_engine(1, state=KILLED))


@pytest.mark.parametrize(
    "engines", [make_engines(spent="0,1"), make_engines(spent="0-1"), make_engines(ended="Failed")]
)
def test_without_any_engine_the_attempt_waits_for_the_trainers_word_and_says_so(
    engines: JobRecord,
) -> None:
    seen = seen_of(engines, *ALL_GONE)
    assert judged(seen).action is Action.WAIT, "the trainer may be done with sampling"
    message = degraded(seen)[2]
    assert message.startswith("0 of 2 engines run: engine 0 ended with OOMKilled")
    assert "none comes back in this attempt" in message
    assert clean_up(seen, LIMITS).delete_jobs == (), "its pods have their logs"


@pytest.mark.parametrize("result", ["EngineLost", "WeightSyncTimeout"])
def test_its_word_starts_an_attempt_with_new_engines(result: str) -> None:
    engines = make_engines(ended="Failed", spent="0,1")
    failed = make_pod(0, state=terminated(51, said(result, message="no engine was left")))
    seen = make_seen(make_job(status=active_status(plan=SERVED_PLAN)), make_child(), failed,
    make_pod(1), engines,
                     *ALL_GONE)  # fmt: skip
    decision = judged(seen)
    assert (decision.action, decision.reason, decision.counted) == (Action.ADMIT, result, True)
    committed = after(
        seen, Decision(Action.COMMIT, plan=SERVED_PLAN, ended=decision.ended, counted=True)
    )
    assert (committed.restarts, committed.ends[-1].reason) == (1, result)
    again = make_seen(stored(seen.job, committed), make_child(), failed, engines, *ALL_GONE)
    assert clean_up(again, LIMITS).delete_jobs == ("run-1-engine",)
    assert judged(again).action is Action.START


@settings(max_examples=cases(200), deadline=None)
@given(
    st.text("0123456789-, x٣", max_size=40)
    | st.sampled_from(["0-999999999", "9" * 1000, "5-1", "-", ","])
)
def test_whatever_a_job_says_of_its_indices_makes_a_sentence(spent: str) -> None:
    seen = seen_of(make_engines(spent=spent), make_engine(0), make_engine(1, state=KILLED))
    assert degraded(seen)[2].startswith("1 of 2 engines run: engine 1 ended with OOMKilled")


def test_indices_of_a_wrong_type_cost_the_job_alone() -> None:
    body = {
        "metadata": {"namespace": "a", "name": "b", "uid": "c", "resourceVersion": "1"},
        "status": {},
    }
    assert job_record(body).spent == ""
    with pytest.raises(Unreadable, match="failedIndexes"):
        job_record({**body, "status": {"failedIndexes": 7}})


def test_a_gang_that_hangs_ends_also_while_its_engines_can_not_be_created() -> None:
    status = active_status(plan=SERVED_PLAN)
    pull = make_pull(step=3, stage="Training", still=100_000)
    decision = judged(make_seen(make_job(status=status), *TRAINERS, pull=pull))
    assert (decision.action, decision.reason, decision.counted) == (Action.ADMIT, "Hang", True)


class Unserved(SlowEnds):
    """A cluster in which a gang trains only beside its engines, and theirs can't be created."""

    held = 0.0
    """The longest time that a gang has held its place."""

    async def live(self, rounds: int = 600) -> "Unserved":
        self.outage = ("POST jobs run-1-engine", "unavailable", NOW + 10_000)
        await super().live(rounds)
        return self

    def _end_gang(self, uid: str) -> None:
        trains = any(owner(pod) == uid for pod in self.pods_of(COMPONENT_TRAINER))
        if trains and not self.pods_of(COMPONENT_ENGINE):
            self.held = self.now - NOW
            self.timers[uid] = self.now + STEP
        else:
            super()._end_gang(uid)


@pytest.mark.parametrize("spec", [{}, QUEUED, {"placement": DECLARED, "preflight": "Off"}])
def test_a_gang_whose_engines_can_not_be_created_gives_its_place_back(spec: Any) -> None:
    world = Unserved(spec, SERVED_PLAN)
    virtually(world.live())
    check(world)
    assert world.held <= LIMITS.scheduling_timeout_seconds + STEP
    end, status = world.job["status"]["ends"][0], world.job["status"]
    assert (end["counted"], status["phase"], status["attempt"]) == (False, "Succeeded", 2)
    assert ("Admitted", "False", "SchedulingTimeout") in world.news
