"""Whatever a user changes, in whatever state a GRPOJob is, the job comes to a rest that fits its
spec as it is now."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.spec.immutability import ALWAYS
from grpo_api.status.status import ConditionType
from grpo_operator.decide.decisions import Decision
from tests.generated import cases
from tests.unit import leader_world
from tests.unit.leader_world import ATTEMPT
from tests.unit.operator_world import PLAN, active_status
from tests.unit.test_operator_leader_states import PHASES

Spec = dict[str, Any]
EDITS: dict[str, Spec] = {
    "nothing": {},
    "suspend": {"suspend": True},
    "resume": {"suspend": False},
    "retry": {"retry": 1},
    "short deadline": {"activeDeadlineSeconds": 1},
    "no deadline": {"activeDeadlineSeconds": None},
    "no restarts": {"restarts": {"limit": 0}},
    "short life": {"ttlSecondsAfterFinished": 10**9},
    "check": {"preflight": "Required"},
    "class": {"jobClassName": "h100"},
    "samples": {"samples": {"everySteps": 5}},
    "tracking": {"tracking": {"tensorboard": {"directory": "/logs"}}},
    "unreadable": {"training": {"beta": "much"}},
    "readable": {"training": {"beta": 0.0}},
}
"""What a user changes: all that may change at any time, and what this version can't read."""
ANSWERS = ("admitted", "waits", "no plan", "refused")
"""What admission says, which an edit may change."""
ENDS = ("", "", "bad", "well")
"""How the gang ends later."""
ACTIVE = ("starting", "running", "backing off")


@dataclass
class World(leader_world.QueuedWorld):
    """A GRPOJob whose spec is changed twice before it rests."""

    changes: list["Change"] = field(default_factory=list)
    rounds: int = 0

    def reconcile(self) -> Decision:
        self.rounds += 1
        if self.changes:
            self.still = min(self.still, 2)
        if self.changes and self.rounds % 3 == 0:
            self.change(self.changes.pop(0))
        return super().reconcile()

    def change(self, change: "Change") -> None:
        """What a user and the gang do."""
        self.still = -1
        self.answer = change.answer or self.answer
        if EDITS[change.edit]:
            self.spec |= EDITS[change.edit]
            self.meta["generation"] += 1
        for pod in self.pods:
            if change.end and pod.is_live:
                pod.state = change.end


class Change(NamedTuple):
    """One change; an answer of "": admission says what it said before."""

    edit: str
    answer: str
    end: str


class State(NamedTuple):
    """What is there before the changes."""

    phase: str
    answer: str

    def world(self, changes: list[Change]) -> World:
        status: dict[str, Any] = {}
        if self.phase != "new":
            status = active_status(ATTEMPT, jobUid="job-2", conditions=PHASES[self.phase])
        is_active = self.phase in ACTIVE
        if not is_active:
            status.pop("attemptStartTime", None)
        meta = {"generation": 1}
        world = World({"suspend": self.phase == "suspended"}, meta, status, PLAN, None)
        world.changes, world.answer = changes, self.answer
        if is_active:
            world.put_job("ours", "job-2")
            world.put_pod("live", 0, "job-2")
            world.put_pod("live", 1, "job-2")
        return world


CHANGES = st.builds(
    Change, st.sampled_from([*EDITS]), st.sampled_from(("", *ANSWERS)), st.sampled_from(ENDS)
)
STATES = st.builds(State, st.sampled_from(("new", *PHASES)), st.sampled_from(ANSWERS))


def test_every_field_that_may_always_change_is_changed() -> None:
    changed = {name for edit in EDITS.values() for name in edit}
    assert changed == {*ALWAYS, "training"}


NOTHING = Change("nothing", "", "")


@settings(max_examples=cases(300))
@given(STATES, st.lists(CHANGES, min_size=2, max_size=2))
@example(State("suspended", "refused"), [Change("resume", "", ""), NOTHING])
@example(State("running", "refused"), [Change("nothing", "", "bad"), NOTHING])
@example(State("new", "no plan"), [Change("suspend", "", ""), Change("samples", "", "")])
@example(State("released", "refused"), [NOTHING, Change("short deadline", "", "")])
@example(State("new", "waits"), [Change("unreadable", "", ""), Change("readable", "refused", "")])
def test_any_two_changes_lead_to_a_rest_that_fits_the_spec(
    state: State, changes: list[Change]
) -> None:
    edits = [change.edit for change in changes]
    world = state.world(changes)
    attempt = world.status.get("attempt", 0)
    world.rest(60)
    job, status = world.look().job, world.status
    assert status["observedGeneration"] == job.generation
    if state.phase == "succeeded" or (state.phase == "failed" and "retry" not in edits):
        assert job.is_finished
        assert status["attempt"] == attempt
    if job.spec is not None:
        is_paused = job.is_suspended and not job.is_finished
        assert job.is_true(ConditionType.SUSPENDED) == is_paused
        assert (status["phase"] == "Suspended") == is_paused
    if not job.is_finished:
        assert ("attemptStartTime" in status) == job.is_active
        assert (status["phase"] in ("Running", "Starting", "Restarting")) == job.is_active
    if job.spec is not None and not job.is_active:
        for said in job.status.conditions:
            _, _, generation = said.message.partition(" in generation ")
            assert generation in ("", str(job.generation)), said
