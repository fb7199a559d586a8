"""How a gang ends: whatever happens to a rank in whatever stage, the exit codes, the termination
messages, the durable outcomes and the operator's answer are those of the cause.

tests/trainer/test_supervisor.py has real processes.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.report.root_cause import PERMANENT
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.pods.manifests import training_plan
from grpo_trainer.process.outcome import kept_outcomes, last_success
from grpo_trainer.process.supervisor import LAST_WORDS_SECONDS, PATIENCE_SECONDS
from tests.generated import cases
from tests.unit.gang_world import ATTEMPT, RAISED, Pod, Rank, Story, stories
from tests.unit.operator_world import (
    PLAN,
    active_status,
    judged,
    make_child,
    make_job,
    make_pod,
    make_story,
    terminated,
)
from tests.unit.test_operator_engine_pods import attempt

TARGET = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No machine crashes here, and what a supervisor takes for itself is put back."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


OLD_WORDS = (
    b'{"result": "BadInput", "rank": 0, "attempt": 2}',
    b'{"result": "Succ',
    b"\xff\xfe",
    b'{"result": "Succeeded", "rank": 0, "attempt": 2, "newerField": 1}',
)


def make_plan(story: Story, run: Path) -> TrainingPlan:
    shape = {"nodes": story.nodes, "processes_per_node": story.per_node}
    made = training_plan(attempt(PLAN.model_copy(update=shape)))
    assert made.job.attempt == ATTEMPT
    return made.model_copy(update={"checkpoint_directory": str(run)})


def operator_looks(story: Story, pods: list[Pod], codes: list[int | None]) -> list[Decision]:
    """What the operator decides each time that it sees another pod's end, and after all."""
    seen = [pod.clock.now() + late for pod, late in zip(pods, story.latencies, strict=True)]
    times = sorted(at for at, code in zip(seen, codes, strict=True) if code is not None)
    last = max(times, default=0.0) + 20.0
    looks: list[tuple[float, list[Any]]] = []
    decisions = []
    status = active_status(ATTEMPT, PLAN.model_copy(update={"nodes": story.nodes}))
    for now in (0.5, *times, last):
        things: list[Any] = [make_child(ATTEMPT)]
        for pod, at, code in zip(pods, seen, codes, strict=True):
            state = None if code is None or at > now else container_end(story, pod, code)
            is_drained = story.cause == "gets SIGTERM" and pod.node == story.node
            conditions = [TARGET] if is_drained else []
            things.append(
                make_pod(pod.node, ATTEMPT, state, conditions=conditions, deleted=is_drained)
            )
        looks.append((now, things))
        ago = [(now - at, before) for at, before in looks]
        decisions.append(judged(make_story(make_job(status=status), *ago)))
    return decisions


def container_end(story: Story, pod: Pod, code: int) -> dict[str, Any]:
    """The state that a kubelet writes, with the end of the log where there is no message."""
    text = pod.message.read_bytes().decode(errors="replace") if pod.message.exists() else ""
    is_oom = code == 137 and story.cause == "is killed for memory" and story.per_node == 1
    if not text and code != 0:
        text = "the end of the log"
    return terminated(code, text, reason="OOMKilled" if is_oom and pod.oom_kills else "")


def told_by(pod: Pod) -> Outcome | None:
    try:
        return Outcome.model_validate_json(pod.message.read_bytes())
    except (OSError, ValueError):
        return None


def require_true_pod(story: Story, pod: Pod, code: int) -> None:
    """Exit code, message and durable outcomes of a pod agree, and are this attempt's."""
    outcome = told_by(pod)
    assert pod.clock.now() <= 8.0 + PATIENCE_SECONDS + 2 * LAST_WORDS_SECONDS + 12.0
    is_done = story.cause == "is done"
    if outcome is None:
        assert story.per_node == 1, "a supervisor can always write"
        return
    assert code == EXIT_CODES[outcome.result]
    assert (outcome.attempt, outcome.rank in pod.ranks) == (ATTEMPT, True)
    if all(story.rank(rank).is_written for rank in pod.ranks) or not is_done:
        assert (outcome.result is Result.SUCCEEDED) == is_done
    kept = {each.rank: each for each in kept_outcomes(pod.folder / "run" / f"attempt-{ATTEMPT}")}
    assert outcome.rank in kept
    if outcome.result is not Result.HANG and story.rank(outcome.rank).is_written:
        assert kept[outcome.rank].result is outcome.result
    is_told = story.cause == "gets SIGTERM" and pod.node == story.node
    if is_told and any(kept[rank].result is Result.PREEMPTED for rank in pod.ranks):
        assert code == EXIT_CODES[Result.PREEMPTED]
    is_undisturbed = all(story.rank(rank).notices is None for rank in pod.ranks)
    for rank in pod.ranks:
        stops = story.rank(rank).stops is not None and story.stage != "Starting"
        if is_told and stops and is_undisturbed:
            assert kept[rank].message == "was told to end", "it has the time that it needs"
        if is_done or (rank == story.culprit and story.cause in RAISED):
            assert kept[rank].result is story.result


def story_of(
    cause: str, *ranks: Rank, has_lost_child: bool = False, latencies: tuple[float, ...] = (1.0,)
) -> Story:
    """Pods whose first rank is the culprit, while it saves; one pod for each latency."""
    nodes = len(latencies)
    shape = nodes, len(ranks) // nodes, list(ranks)
    return Story(*shape, cause, 0, "Saving", list(latencies), b"", has_lost_child=has_lost_child)


QUICK, SLOW, STUCK = Rank(None, 0.0, True), Rank(None, 8.0, True), Rank(None, None, True)
SILENT, LOST = Rank(None, 0.0, False), Rank(0.0, 0.0, False)


@settings(max_examples=cases(120, gate=15))
@given(story=stories())
@example(story_of("gets SIGTERM", SILENT, SLOW))
@example(story_of("gets SIGTERM", QUICK, STUCK))
@example(story_of("gets SIGTERM", QUICK, Rank(0.1, 0.2, True)))
@example(story_of("exits with 0", QUICK, QUICK))
@example(story_of("gets a real-time signal", QUICK, STUCK))
@example(story_of("user code raises", QUICK, STUCK, has_lost_child=True))
@example(story_of("a reward fails", SILENT, QUICK))
@example(story_of("is done", QUICK, SILENT))
@example(story_of("the data is wrong", QUICK, LOST, latencies=(2.0, 1.0)))
@example(story_of("user code raises", QUICK, Rank(0.0, 0.0, True), latencies=(2.0, 1.0)))
def test_the_cause_is_what_a_gang_and_the_operator_tell_of(
    tmp_path_factory: pytest.TempPathFactory, story: Story
) -> None:
    folder = tmp_path_factory.mktemp("gang")
    (folder / "run" / f"attempt-{ATTEMPT}").mkdir(parents=True)
    old = folder / "run" / "attempt-2"
    old.mkdir()
    for rank, words in enumerate(OLD_WORDS, start=1):
        (old / f"outcome-rank-{rank}.json").write_bytes(words)
    plan = make_plan(story, folder / "run")
    pods = [Pod(story, node, plan, folder) for node in range(story.nodes)]
    codes = [pod.run() for pod in pods]
    for pod, code in zip(pods, codes, strict=True):
        if code is not None:
            require_true_pod(story, pod, code)
    assert [path.read_bytes() for path in sorted(old.iterdir())] == list(OLD_WORDS)
    decisions = operator_looks(story, pods, codes)
    require_answer(story, decisions)
    assert decisions[-1].action is not Action.WAIT or not any(codes), "an end has its answer"


def require_answer(story: Story, decisions: list[Decision]) -> None:
    """The operator answers the cause, and never anything else on the way."""
    for decision in decisions:
        if decision.action is Action.WAIT:
            continue
        ended = decision.ended
        assert ended is not None
        is_done_unseen = story.cause == "is done" and not story.rank(0).is_written
        if is_done_unseen or (story.is_lost and story.result in PERMANENT):
            # Without words an exit code is believed less than that; the volume has the success.
            assert decision.action is Action.ADMIT
            continue
        is_drained = story.cause == "gets SIGTERM"
        assert ended.result is (Result.PREEMPTED if is_drained else story.result)
        # Its peers end with the same result, and say that they have lost a peer.
        if story.cause == "user code raises" and all(rank.is_written for rank in story.ranks):
            assert ended.rank == story.culprit
        assert (decision.action is Action.SUCCEED) == (story.cause == "is done")
        assert (decision.action is Action.FAIL) == (story.result in PERMANENT)
        if decision.action is Action.ADMIT:
            assert decision.counted == (story.cause != "gets SIGTERM")


SUCCESS = '{"result": "Succeeded", "attempt": 1, "step": 6'


@pytest.mark.parametrize(
    ("place", "content", "is_done"),
    [
        ("attempt-2/outcome-rank-0.json", SUCCESS + "}", True),
        ("attempt-2/outcome-rank-0.json", SUCCESS + ', "fieldOfANewerImage": 1}', True),
        ("attempt-2/outcome-rank-0.json", SUCCESS, False),
        ("attempt-2/outcome-rank-1.json", SUCCESS + "}", False),
        ("attempt-2.bak/outcome-rank-0.json", SUCCESS + "}", False),
    ],
)
def test_a_whole_success_of_rank_0_ends_a_run(
    tmp_path: Path, place: str, content: str, is_done: bool
) -> None:
    for number, words in enumerate(OLD_WORDS[:3]):
        old = tmp_path / f"attempt-{number}" / "outcome-rank-0.json"
        old.parent.mkdir()
        old.write_bytes(words)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(content, encoding="utf-8")
    assert (last_success(tmp_path) is not None) == is_done
