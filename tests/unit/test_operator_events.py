"""What events say; and under load: late, but as many as are made, in order for each job, the
dropped ones counted."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.artifacts import Export, weights_hash
from grpo_api.status.status import Condition, GRPOJobStatus
from grpo_api.status.usage import GPUSeconds, Usage
from grpo_kube.event_sender import BACKLOG, PATIENCE, SENDERS, EventRecorder
from grpo_kube.objects.errors import AlreadyExists, Denied, Unavailable
from grpo_kube.objects.times import timestamp
from grpo_operator.records import records
from grpo_operator.report.events import (
    MAX_MESSAGE,
    REPEAT_SECONDS,
    event,
    merge_start_event,
    repeated_end_event,
    telling_change,
)
from grpo_operator.report.status import to_json
from tests.generated import cases
from tests.unit.operator_world import KEY, NOW, at, make_job
from tests.virtual_time import virtually


class Server:
    """Takes events, each after a while, and refuses some."""

    def __init__(self, seconds: float, refuses: frozenset[int] = frozenset()) -> None:
        self.seconds, self.refuses = seconds, refuses
        self.got: dict[str, list[int]] = defaultdict(list)
        self.times: list[float] = []
        self.at_a_time: Counter[str] = Counter()
        self.most = 0

    async def create(self, _resource: Any, _namespace: str, body: Any) -> Any:
        name, number = body["involvedObject"]["name"], int(body["reason"].removeprefix("Number"))
        self.at_a_time[name] += 1
        assert self.at_a_time[name] == 1
        self.most = max(self.most, self.at_a_time.total())
        await asyncio.sleep(self.seconds)
        self.at_a_time[name] -= 1
        if number in self.refuses:
            raise (Denied if number % 2 else Unavailable)("no", 403)
        self.got[name].append(number)
        self.times.append(asyncio.get_running_loop().time())
        return body


def _counting(counts: Counter[str]) -> Callable[[str], None]:
    """Return a function that counts results."""
    return lambda result: counts.update([result])


def told(recorder: EventRecorder, name: str, number: int) -> None:
    """Records that a condition of the job has changed."""
    new = Condition(
        type="Running", status="True", reason=f"Number{number}", last_transition_time=at(0)
    )
    job = make_job(name=name)
    recorder.record(job.key, event(job, new, NOW))


async def sent(
    server: Server, jobs: list[int], *, busy: bool, gap: float = 0.0, wait: float = 600.0
) -> tuple[Server, Counter[str]]:
    """Records an event of each of these jobs in turn, so many seconds apart, and gives them time to
    arrive."""
    counts: Counter[str] = Counter()
    count = _counting(counts)
    recorder = EventRecorder(server, merge_start_event, lambda: busy, count)  # type: ignore[arg-type]
    running = asyncio.create_task(recorder.run())
    for number, job in enumerate(jobs):
        told(recorder, f"job-{job}", number)
        await asyncio.sleep(gap)
    await asyncio.sleep(wait)
    running.cancel()
    return server, counts


def test_under_lasting_load_events_come_as_fast_as_they_are_made() -> None:
    jobs = list(range(100)) * 5
    server, counts = virtually(sent(Server(0.05), jobs, busy=True, gap=0.1, wait=PATIENCE + 5))
    assert counts == {"sent": 500}
    assert server.times[-1] <= 500 * 0.1 + PATIENCE + 1


def test_an_event_waits_while_jobs_wait_for_a_look() -> None:
    server, _ = virtually(sent(Server(0.0), [1], busy=True))
    assert PATIENCE <= server.times[0] < PATIENCE + 1
    server, _ = virtually(sent(Server(0.0), [1], busy=False))
    assert server.times[0] == 0.0


def test_more_than_the_backlog_is_dropped_and_counted() -> None:
    _, counts = virtually(sent(Server(1.0), list(range(BACKLOG + 50)), busy=False))
    assert counts == {"sent": BACKLOG, "dropped": 50}
    _, counts = virtually(sent(Server(1.0), [7] * (BACKLOG + 50), busy=False, wait=2.0 * BACKLOG))
    assert counts == {"sent": BACKLOG, "dropped": 50}


@settings(max_examples=cases(40))
@given(
    jobs=st.lists(st.integers(0, 12), max_size=120),
    busy=st.booleans(),
    seconds=st.floats(0.0, 3.0),
    gap=st.floats(0.0, 1.0),
    refuses=st.frozensets(st.integers(0, 119)),
)
def test_each_jobs_events_keep_their_order_whatever_the_server_refuses(
    jobs: list[int], busy: bool, seconds: float, gap: float, refuses: frozenset[int]
) -> None:
    server, counts = virtually(sent(Server(seconds, refuses), jobs, busy=busy, gap=gap))
    expected: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        if number not in refuses:
            expected[f"job-{job}"].append(number)
    assert server.got == expected
    assert server.most <= SENDERS
    assert counts.total() == len(jobs)


class Kept:
    """Takes events at once."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    async def create(self, _resource: Any, _namespace: str, body: Any) -> Any:
        self.bodies.append(body)
        return body


async def started(*, busy: bool, gap: float) -> tuple[list[Any], Counter[str]]:
    """What arrives of a job that is admitted, runs so many seconds later, and then fails."""
    server, counts = Kept(), Counter[str]()
    count = _counting(counts)
    recorder = EventRecorder(server, merge_start_event, lambda: busy, count)  # type: ignore[arg-type]
    running, job = asyncio.create_task(recorder.run()), make_job()
    for number, (kind, reason) in enumerate(
        [("Admitted", "Admitted"), ("Running", "AllPodsRunning"), ("Failed", "BadInput")]
    ):
        (new,) = stated(**{kind: ("True", reason)})
        recorder.record(job.key, event(job, new, NOW + number))
        await asyncio.sleep(gap)
    await asyncio.sleep(60)
    running.cancel()
    return server.bodies, counts


def test_an_admission_that_waits_is_told_with_the_start() -> None:
    bodies, counts = virtually(started(busy=True, gap=1.0))
    assert [body["reason"] for body in bodies] == ["AllPodsRunning", "BadInput"]
    assert bodies[0]["message"] == "Running=True: said; before: Admitted=True: said"
    assert bodies[0]["firstTimestamp"] < bodies[0]["lastTimestamp"]
    assert bodies[1]["message"] == "Failed=True: said"
    assert counts == {"folded": 1, "sent": 2}


@pytest.mark.parametrize(("busy", "gap"), [(False, 1.0), (True, PATIENCE + 1)])
def test_an_admission_that_was_told_is_not_told_again(busy: bool, gap: float) -> None:
    bodies, counts = virtually(started(busy=busy, gap=gap))
    assert [body["reason"] for body in bodies] == ["Admitted", "AllPodsRunning", "BadInput"]
    assert counts == {"sent": 3}


def test_no_words_are_lost_by_folding() -> None:
    one = event(make_job(), stated(Admitted=("True", "Admitted"))[0], NOW)
    runs = {**one, "reason": "AllPodsRunning"}
    for length in (MAX_MESSAGE, MAX_MESSAGE - len(one["message"])):
        assert merge_start_event(one, {**runs, "message": "x" * length}) is None
    assert merge_start_event(one, {**runs, "message": "x" * 500}) is not None
    assert (
        merge_start_event(one, one)
        is merge_start_event(runs, one)
        is merge_start_event(one, {**runs, "reason": "BadInput"})
        is None
    )


def stated(**types: tuple[str, str]) -> list[Condition]:
    return [
        Condition(
            type=kind, status=status, reason=reason, message="said", last_transition_time=at(0)
        )
        for kind, (status, reason) in types.items()
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({}, {"Admitted": ("True", "Admitted"), "Running": ("False", "Starting")}, "Admitted"),
        ({}, {"Admitted": ("False", "NoImage")}, "Admitted"),
        ({"Running": ("False", "Starting")}, {"Running": ("True", "AllPodsRunning")}, "Running"),
        (
            {"Running": ("True", "R")},
            {"Running": ("False", "Finished"), "Failed": ("True", "BadInput")},
            "Failed",
        ),
        (
            {"Admitted": ("True", "Admitted"), "Running": ("True", "R"), "Healthy": ("True", "R")},
            {
                "Admitted": ("False", "Evicted"),
                "Running": ("False", "Evicted"),
                "Healthy": ("Unknown", "Unseen"),
            },
            "Admitted",
        ),
        ({"Running": ("True", "R")}, {"Running": ("True", "R")}, ""),
        ({}, {"Degraded": ("False", "AsExpected")}, ""),
        ({"Admitted": ("False", "A")}, {"Admitted": ("False", "B")}, "Admitted"),
    ],
)
def test_which_change_becomes_the_event(old: Any, new: Any, told: str) -> None:
    found = telling_change(stated(**old), stated(**new))
    assert (found.type if found else "") == told


def test_an_event_says_what_and_how_bad() -> None:
    (failed,) = stated(Failed=("True", "BadInput"))
    body = event(make_job(), failed, NOW)
    assert (body["type"], body["reason"], body["message"]) == (
        "Warning",
        "BadInput",
        "Failed=True: said",
    )
    assert body["involvedObject"]["uid"] == make_job().uid
    (refused, runs) = stated(Admitted=("False", "NoImage"), Running=("True", "AllPodsRunning"))
    assert [event(make_job(), one, NOW)["type"] for one in (refused, runs)] == ["Warning", "Normal"]


def test_the_event_of_the_end_sums_up_what_became_of_the_gpus() -> None:
    usage = Usage(as_of="2026-01-31T12:00:00Z", held_gpu_seconds=7200, effective="0.750", cost=5.0)
    usage = usage.model_copy(update={"gpu_seconds": GPUSeconds(training=5400, lost=1800)})
    (done,) = stated(Succeeded=("True", "Succeeded"))
    words = "2.00 GPU-hours, effective 0.750: training 75 %, lost 25 %; cost 5.00"
    status = GRPOJobStatus(usage=usage)
    assert event(make_job(), done, NOW, status)["message"] == f"Succeeded=True: said; {words}"
    long = done.model_copy(update={"message": "x" * 5000})
    message = event(make_job(), long, NOW, status)["message"]
    assert (len(message), message.endswith(words)) == (1024, True)
    (runs,) = stated(Running=("True", "AllPodsRunning"))
    assert event(make_job(), runs, NOW, status)["message"] == "Running=True: said"


@given(path=st.text("abc/", min_size=1, max_size=1024), said=st.integers(0, 5000))
def test_the_event_of_the_end_says_where_the_model_is(path: str, said: int) -> None:
    model = Export(
        to="Volume", path=path, format="Model", bytes=3 << 29, weights_hash=weights_hash({})
    )
    (done,) = stated(Succeeded=("True", "Succeeded"))
    long = done.model_copy(update={"message": "x" * said})
    message = event(make_job(), long, NOW, GRPOJobStatus(export=model))["message"]
    assert len(message) <= 1024
    assert f"; model of 1.5 GiB at {path[:800]}" in message
    assert message.startswith("Succeeded=True: " + "x" * min(said, 100))


@pytest.mark.parametrize("kind", ["Succeeded", "Failed"])
@pytest.mark.parametrize("age", [0, 119, 121])
def test_a_new_leader_repeats_the_event_of_an_end_under_the_same_name(kind: str, age: int) -> None:
    (end,) = stated(**{kind: ("True", "Because")})
    status = GRPOJobStatus(conditions=[end], completion_time=timestamp(NOW - age))
    before = event(make_job(), end, NOW - age, status)
    repeated = repeated_end_event(make_job(status=to_json(status)), NOW)
    assert (repeated is None) == (age > REPEAT_SECONDS)
    if repeated:
        assert repeated["metadata"] == before["metadata"]
        assert repeated["message"] == before["message"]
    another_end = end.model_copy(update={"last_transition_time": at(1)})
    for other in (
        event(make_job(uid="another"), end, NOW, status),
        event(make_job(), another_end, NOW, status),
    ):
        assert other["metadata"]["name"] != before["metadata"]["name"]


def test_a_new_leader_unpacks_no_job_that_ended_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster keeps ten thousand of them: for seconds nothing else would run, not even the
    renewal of the Lease."""
    (end,) = stated(Succeeded=("True", "Succeeded"))
    status = GRPOJobStatus(conditions=[end], completion_time=timestamp(NOW - 2 * REPEAT_SECONDS))
    job = make_job(status=to_json(status))
    monkeypatch.setattr(records, "unpack_job", lambda _: pytest.fail("it is unpacked"))
    assert repeated_end_event(job, NOW) is None


def test_only_an_end_is_repeated() -> None:
    assert repeated_end_event(make_job(), NOW) is None
    (runs,) = stated(Running=("True", "AllPodsRunning"))
    assert "generateName" in event(make_job(), runs, NOW)["metadata"]


class Knowing:
    """An API server that has each event already."""

    async def create(self, *_: Any) -> Any:
        raise AlreadyExists("events exists", 409)


async def test_an_event_that_another_leader_sent_counts_as_sent() -> None:
    counts: Counter[str] = Counter()
    recorder = EventRecorder(Knowing(), count=_counting(counts))  # type: ignore[arg-type]
    (done,) = stated(Succeeded=("True", "Succeeded"))
    recorder.record(KEY, event(make_job(), done, NOW))
    task = asyncio.create_task(recorder.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    assert counts == {"sent": 1}


def test_each_event_has_a_name_so_that_a_second_try_makes_no_second_event() -> None:
    """The client asks again if an answer is lost."""
    bodies, _ = virtually(started(busy=False, gap=30.0))
    names = {body["metadata"].get("name", "") for body in bodies}
    assert len(names) == len(bodies) == 3
    assert all(name.startswith("run.") for name in names)
    assert not any("generateName" in body["metadata"] for body in bodies)


class Refusing:
    """An API server that takes no events."""

    def __init__(self) -> None:
        self.asked = 0

    async def create(self, *_: Any) -> Any:
        self.asked += 1
        raise Unavailable("away")


async def test_events_are_dropped_rather_than_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    server = Refusing()
    recorder = EventRecorder(server)  # type: ignore[arg-type]
    (admitted,) = stated(Admitted=("True", "Admitted"))
    for _ in range(BACKLOG + 1):
        recorder.record(KEY, event(make_job(), admitted, NOW))
    assert "dropped, 1000 are waiting" in caplog.text
    task = asyncio.create_task(recorder.run())
    await asyncio.sleep(0.5)
    task.cancel()
    assert server.asked == BACKLOG
    assert "not recorded: away" in caplog.text
