"""Trackers of a run: what goes to them, what is lost of it and how that is told, in virtual time.

The stand-in is a tracker's process. Real ones are in tests/trainer/test_tracking.py.
"""

import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from grpo_api.job import parse_spec
from grpo_api.job_object import GRPOJob
from grpo_api.report.report import Progress, Result, TrackerReport
from grpo_api.spec.tracking import TABLE_TRACKERS, TrackerName, TrackingSpec
from grpo_api.text.contract import TRACKERS_ENV, tracking_token_env
from grpo_cli.commands.status import show_status
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.pods.manifests import attempt_of, training_plan
from grpo_operator.pods.pod_spec import pod_spec
from grpo_operator.pods.roles import roles
from grpo_operator.report.events import tracking_event
from grpo_trainer.tracking.tracker_feed import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_KEYS,
    MAX_TABLE_BYTES,
    QUEUE_ROWS,
    QUEUE_TABLES,
    End,
    Groups,
    Row,
    RowRefused,
    TrackerFailed,
    TrackerFeed,
    row_of,
)
from grpo_trainer.tracking.tracking import (
    CONFIG_FIELDS,
    TrackedJob,
    Tracking,
    child_environment,
    end_of,
    shown_url,
)
from tests.generated import cases
from tests.samples import GOOD, changed
from tests.stepped_clock import SteppedClock
from tests.unit.operator_world import (
    GPU_PLAN,
    NOW,
    PODS,
    active_status,
    after,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
)

SPEC = changed(GOOD["all-trackers"])
PAGE = "https://wandb.ai/team/grpo/runs/1"


class Tracker:
    """A tracker's process, and the world around it: `fails(row)` raises what goes wrong."""

    def __init__(
        self, clock: SteppedClock, fails: Callable[[Row], None] = lambda _: None, away: float = 0.0
    ) -> None:
        self._clock, self._fails, self._away = clock, fails, away
        self.run_id = "run-1"
        self.url: str | None = PAGE
        self.first_steps: list[int] = []
        self.tries: list[float] = []
        self.steps: list[int] = []
        self.tables: list[Groups] = []
        self.ends: list[End] = []
        self.closed = 0

    def open(self, step: int, _: float) -> "Tracker":
        self.tries.append(self._clock.now())
        if self._clock.now() < self._away:
            raise TrackerFailed("HTTP 503")
        self.first_steps.append(step)
        return self

    def send(self, row: Row, _: float) -> None:
        self._fails(row)
        self.steps.append(row.step)
        self.tables += [row.groups] if row.groups else []

    def finish(self, end: End, _: float) -> None:
        self.ends.append(end)

    def close(self) -> None:
        self.closed += 1


def followed(
    tracker: Tracker, clock: SteppedClock, rows: int, seconds: float = 1e9, first: int = 1
) -> TrackerReport:
    """What the feed reports after a run of that many steps, whose end may take so many seconds."""
    reports: list[TrackerReport] = []
    feed = TrackerFeed("wandb", tracker.open, reports.append, clock)
    for step in range(first, first + rows):
        feed.put(row_of(step, {"loss": 1.0}))
    feed.end("finished", seconds)
    feed.run(first)
    feed.abandon()
    assert not reports or reports[-1] == feed.report
    return feed.report


def test_every_row_arrives_in_order_and_the_run_ends() -> None:
    clock = SteppedClock()
    tracker = Tracker(clock)
    report = followed(tracker, clock, 5, first=8)
    assert tracker.steps == [8, 9, 10, 11, 12]
    assert (tracker.first_steps, tracker.ends, tracker.closed > 0) == ([8], ["finished"], True)
    assert report == TrackerReport(name="wandb", run_id="run-1", url=PAGE)


def test_a_tracker_that_is_away_gets_all_rows_when_it_is_back() -> None:
    clock = SteppedClock()
    tracker = Tracker(clock, away=1000.0)
    assert followed(tracker, clock, 5).lost_rows == 0
    assert tracker.steps == [1, 2, 3, 4, 5]


NAMES: tuple[TrackerName, ...] = ("wandb", "mlflow", "trackio", "tensorboard")


def tables_of(
    sizes: list[int], *, sends_samples: bool = True, waiting: int = 0
) -> dict[TrackerName, list[Groups]]:
    """The tables that each tracker gets of a step whose groups have so many letters, behind so many
    rows."""
    clock = SteppedClock()
    trackers = {name: Tracker(clock) for name in NAMES}
    feeds = {
        name: TrackerFeed(name, tracker.open, lambda _: None, clock)
        for name, tracker in trackers.items()
    }
    tracking = Tracking(tuple(feeds.values()), clock, sends_samples=sends_samples)
    for step in range(waiting):
        tracking.log(step, {"loss": 1.0})
    tracking.send_samples(waiting, [{"prompt": "p" * size} for size in sizes])
    for name, feed in feeds.items():
        feed.end("finished", 1e9)
        feed.run(1)
        lost = waiting >= QUEUE_TABLES and sends_samples and name in TABLE_TRACKERS
        assert feed.report.lost_rows == int(lost), name
        assert len(trackers[name].steps) == waiting + len(trackers[name].tables)
    return {name: tracker.tables for name, tracker in trackers.items()}


def test_samples_go_to_the_trackers_with_tables_and_only_if_the_job_wants_it() -> None:
    tables = tables_of([3])
    assert tables["wandb"] == tables["trackio"] == [[{"prompt": "ppp"}]]
    assert not tables["mlflow"] + tables["tensorboard"]
    assert not any(tables_of([3], sends_samples=False).values())
    assert not any(tables_of([]).values())
    assert TrackingSpec().samples is False


@pytest.mark.parametrize("waiting", [QUEUE_TABLES - 1, QUEUE_TABLES, QUEUE_TABLES + 1])
def test_a_tracker_that_is_away_makes_no_heap_of_tables(waiting: int) -> None:
    assert bool(tables_of([3], waiting=waiting)["wandb"]) == (waiting < QUEUE_TABLES)


@given(sizes=st.lists(st.sampled_from([1, MAX_TABLE_BYTES // 3, MAX_TABLE_BYTES]), max_size=5))
@settings(max_examples=10)
def test_a_table_has_the_first_groups_that_fit_into_its_bytes(sizes: list[int]) -> None:
    tables = tables_of(sizes)["wandb"]
    lengths = [len(group["prompt"]) for table in tables for group in table]
    assert lengths == sizes[: len(lengths)]
    assert sum(lengths) < MAX_TABLE_BYTES
    rest = sizes[len(lengths) :]
    assert not rest or sum(lengths) + rest[0] + 20 * len(sizes) > MAX_TABLE_BYTES


def test_the_pauses_between_two_tries_grow_to_the_longest() -> None:
    clock = SteppedClock()
    # The row that is delivered at last is the run's last.
    tracker = Tracker(clock, fails=lambda _: feed.end("finished", 1.0), away=2000.0)
    feed = TrackerFeed("wandb", tracker.open, lambda _: None, clock)
    feed.put(row_of(1, {"loss": 1.0}))
    feed.run(1)
    pauses = [
        later - earlier for earlier, later in zip(tracker.tries, tracker.tries[1:], strict=False)
    ]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert tracker.tries[-1] < 2000.0 + 2 * LONGEST_PAUSE


def test_a_row_that_a_tracker_refuses_is_lost_alone() -> None:
    def fails(row: Row) -> None:
        if row.step == 3:
            raise RowRefused("ValueError: no")

    clock = SteppedClock()
    tracker = Tracker(clock, fails)
    report = followed(tracker, clock, 5)
    assert tracker.steps == [1, 2, 4, 5]
    assert (report.lost_rows, report.problem, len(tracker.first_steps)) == (1, "", 1)


def test_a_process_that_dies_loses_the_row_on_its_way_and_is_started_again_at_the_next() -> None:
    def fails(row: Row) -> None:
        if row.step == 3:
            raise TrackerFailed("its process ended with status -9")

    clock = SteppedClock()
    tracker = Tracker(clock, fails)
    report = followed(tracker, clock, 5)
    assert tracker.steps == [1, 2, 4, 5]
    assert tracker.first_steps == [1, 4], "the events before stay valid: purge_step is the next row"
    assert report.lost_rows == 1


def test_a_node_without_memory_for_one_more_process_costs_rows_only() -> None:
    def fails(row: Row) -> None:
        if row.step == 2:
            raise OSError(12, "Cannot allocate memory")

    clock = SteppedClock()
    tracker = Tracker(clock, fails)
    report = followed(tracker, clock, 3)
    assert (tracker.steps, report.lost_rows) == ([1, 3], 1)


def test_the_end_waits_for_a_bounded_time_and_counts_what_is_left() -> None:
    clock = SteppedClock()
    report = followed(Tracker(clock, away=math.inf), clock, 7, seconds=30.0)
    assert (report.lost_rows, report.problem) == (7, "HTTP 503")
    assert clock.now() <= 30.0 + 1.0


def test_a_full_queue_loses_its_oldest_row_and_never_waits() -> None:
    clock = SteppedClock()
    tracker = Tracker(clock)
    report = followed(tracker, clock, QUEUE_ROWS + 3)
    assert report.lost_rows == 3
    assert tracker.steps[0] == 4


def test_a_problem_is_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: Row) -> None:
        raise RowRefused("disk full")

    clock = SteppedClock()
    assert followed(Tracker(clock, fails), clock, 50).lost_rows == 50
    assert caplog.text.count("disk full; training goes on") == 1


VALUES = st.one_of(
    st.floats(),
    st.integers(-(10**400), 10**400),
    st.booleans(),
    st.none(),
    st.text(st.characters(), max_size=5),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=cases(100))
@given(logs=st.dictionaries(st.text(st.characters(), max_size=300), VALUES, max_size=20))
def test_whatever_a_step_logs_a_row_is_bounded_and_can_be_sent(logs: dict[str, Any]) -> None:
    row = row_of(1, logs)
    again = json.loads(json.dumps(row.values).encode())
    assert again.keys() == row.values.keys()
    assert all(isinstance(value, float) for value in again.values())
    numbers = {key for key, value in logs.items() if isinstance(value, float)}
    assert len(row.values) <= len(logs)
    assert bool(row.values) >= bool(numbers)


def test_a_huge_step_is_cut() -> None:
    assert len(row_of(1, {f"key-{number}": 1.0 for number in range(10**4)}).values) == MAX_KEYS


@pytest.mark.parametrize(
    ("result", "end"),
    [
        (Result.SUCCEEDED, "finished"),
        (Result.PREEMPTED, "killed"),
        (Result.HANG, "failed"),
        (Result.ERROR, "failed"),
    ],
)
def test_a_run_ends_as_trackers_call_it(result: Result, end: str) -> None:
    assert end_of(result) == end


def test_a_tracker_s_process_has_its_own_secret_and_no_other() -> None:
    own = tracking_token_env("wandb")
    others = [tracking_token_env("mlflow"), "GRPO_EXPORT_TOKEN", "GRPO_REWARD_TOKEN_0", "HF_TOKEN"]
    given_to = dict.fromkeys((own, *others), "secret") | {
        "HTTPS_PROXY": "http://proxy",
        TRACKERS_ENV: "/trackers",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    seen = child_environment(given_to, "wandb")
    assert not set(others) & set(seen)
    assert (seen[own], seen["HTTPS_PROXY"], seen["CUDA_VISIBLE_DEVICES"]) == (
        "secret",
        "http://proxy",
        "",
    )


def requests(attempt: int) -> dict[str, dict[str, Any]]:
    """What the processes of all trackers are asked to open in an attempt of the job."""
    plan = training_plan(attempt_of(make_job(SPEC), parse_spec(SPEC), GPU_PLAN, attempt))
    assert plan.tracking
    config = plan.model_dump(mode="json", by_alias=True, exclude_none=True, include=CONFIG_FIELDS)
    job = TrackedJob(plan.job, "a run", plan.checkpoint_directory, config)
    return {name: job.request(name, tracker, 4) for name, tracker in plan.tracking.trackers}


def test_a_tracker_is_told_spec_and_plan_and_of_secrets_the_names() -> None:
    asked = requests(1)
    assert {"model", "dataset", "training", "execution", "job"} <= asked["wandb"]["config"].keys()
    assert asked["tensorboard"]["folder"].endswith("/tensorboard")
    assert [asked[name]["folder"] for name in ("wandb", "mlflow", "trackio")] == ["", "", ""]
    assert "token_secret_ref" not in json.dumps([one["settings"] for one in asked.values()])


def test_all_attempts_are_one_run() -> None:
    first, second = requests(1), requests(2)
    assert len(first) == 4
    for name, request in first.items():
        assert request | {"config": {}} == second[name] | {"config": {}}


def test_tokens_reach_training_pods_by_secret_and_hold_no_pod_back() -> None:
    trainers = pod_spec("run", roles(parse_spec(SPEC), GPU_PLAN)[0], {}, PODS)
    variables = {one["name"]: one for one in trainers["containers"][0]["env"]}
    assert variables[tracking_token_env("wandb")]["valueFrom"] == {
        "secretKeyRef": {"name": "wandb", "key": "token", "optional": True}
    }
    assert tracking_token_env("mlflow") not in variables, "it has no token"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (PAGE, PAGE),
        ("http://mlflow:5000/#/experiments/1/runs/2", "http://mlflow:5000/#/experiments/1/runs/2"),
        ("https://server/run?write_token=secret", "https://server/run"),
        ("https://user:word@server/run", None),
        ("javascript:alert(1)", None),
        ("https://server/" + "a" * 600, None),
        ("", None),
        (None, None),
    ],
)
def test_only_a_plain_page_is_shown(url: str | None, shown: str | None) -> None:
    assert shown_url(url) == shown


@settings(max_examples=cases(50))
@given(text=st.text(max_size=80))
def test_no_text_of_a_tracker_makes_progress_unreadable(text: str) -> None:
    report = TrackerReport(name="wandb", url=shown_url(text), problem=text)
    Progress.model_validate_json(Progress(attempt=1, trackers=[report]).model_dump_json())


def test_a_pod_s_word_with_credentials_in_a_url_is_not_read() -> None:
    with pytest.raises(ValidationError):
        TrackerReport(name="wandb", url="https://user:word@host/")


def test_the_status_has_each_tracker_and_one_event_tells_of_the_first_loss() -> None:
    def status(job: Any, lost: int) -> Any:
        report = TrackerReport(
            name="wandb", run_id="1", url=PAGE, lost_rows=lost, problem="HTTP 503"
        )
        pull = make_pull(trackers=[report])
        seen = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull)
        return after(seen, Decision(Action.WAIT))

    job = make_job(status=active_status())
    first = status(job, 2)
    assert first.tracking[0].url == PAGE
    told = tracking_event(job, first, NOW)
    assert told
    assert (told["type"], told["reason"]) == ("Warning", "TrackerLosesRows")
    assert told["message"].endswith("wandb: HTTP 503")
    known = make_job(
        status=active_status() | {"tracking": [first.tracking[0].model_dump(by_alias=True)]}
    )
    assert tracking_event(known, status(known, 3), NOW) is None
    assert tracking_event(job, status(job, 0), NOW) is None


def test_grpo_status_shows_the_page_and_what_was_lost() -> None:
    reports = [
        {"name": "wandb", "url": PAGE, "runId": "1"},
        {"name": "mlflow", "lostRows": 1200, "problem": "HTTP 503"},
    ]
    known = make_job(SPEC, active_status() | {"tracking": reports})
    assert known.spec
    out = Console(width=200, file=io.StringIO(), highlight=False)
    show_status(out, "team/run", GRPOJob(spec=known.spec, status=known.status))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert f"wandb {PAGE}" in text
    assert "mlflow has not answered yet; 1,200 rows lost: HTTP 503" in text
