"""Two operators and one Lease: killed, told to end and stopped in a burst of jobs, nothing is made
twice and none lost.

Each operator is a process with the identity of a pod, behind the chart's fence; API server and Job
controller are real. How long takeovers take is printed, and held by nothing but that they come.
"""

import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_operator.records.names import FENCE
from tests.integration import stopped_writer
from tests.integration.leader_bench import LEASES, Seat, holder, named, seats
from tests.integration.operator_bench import GRPOJOBS, SPEC, Bench

WRITE = re.compile(r'rest_client_requests_total.*method="(POST|PUT|PATCH|DELETE)"')
ONE_POD = {"placement": {"accelerator": "CPU", "nodes": 1}}


class Burst:
    """Jobs that keep coming while their operators die."""

    def __init__(self, bench: Bench, count: int, pause: float) -> None:
        """So many, one after each pause in seconds."""
        self.names = [f"run-{number}" for number in range(count)]
        self._bench, self._pause = bench, pause
        self._thread = threading.Thread(target=self._submit, daemon=True)

    def _submit(self) -> None:
        for name in self.names:
            self._bench.submit(name, **ONE_POD)
            time.sleep(self._pause)

    def start(self) -> None:
        """Begins to submit."""
        self._thread.start()

    def wait_running(self) -> None:
        """Waits until all of them run."""
        self._thread.join()

        def phases() -> list[str]:
            return [
                item.get("status", {}).get("phase", "")
                for item in self._bench.get(GRPOJOBS)["items"]
            ]

        self._bench.wait("all jobs to run", lambda: phases() == ["Running"] * len(self.names), 180)


def judge(bench: Bench, seen: Callable[[], list[dict[str, object]]]) -> None:
    """Each job has one attempt and ever had one Job."""
    jobs = bench.get(GRPOJOBS)["items"]
    assert {item["status"]["attempt"] for item in jobs} == {1}
    children = {f"{item['metadata']['name']}-1" for item in jobs}
    bench.wait("the watch to tell of all Jobs", lambda: children <= uids_by_name(seen()).keys())
    uids = uids_by_name(seen())
    assert uids.keys() == children
    assert all(len(found) == 1 for found in uids.values())


def uids_by_name(items: list[dict[str, object]]) -> dict[str, set[str]]:
    """The uids of all objects that had the name."""
    uids: dict[str, set[str]] = defaultdict(set)
    for item in items:
        meta = item["metadata"]
        assert isinstance(meta, dict)
        uids[meta["name"]].add(meta["uid"])
    return uids


def kill(leader: Seat, follower: Seat) -> None:
    leader.signal(signal.SIGKILL)
    leader.wait()


def in_turns(
    both: tuple[Seat, Seat], times: int, strike: Callable[[Seat, Seat], None]
) -> list[float]:
    """Strikes the leader, waits until the other leads and starts the struck one again; the seconds
    of each takeover."""
    took = []
    for turn in range(times):
        leader, follower = both[turn % 2], both[1 - turn % 2]
        follower.wait_ready()
        time.sleep(0.5)
        since = time.monotonic()
        strike(leader, follower)
        follower.wait_works()
        took.append(time.monotonic() - since)
        leader.end()
        leader.start()
    return took


def storm(bench: Bench, folder: Path, kills: int, jobs: int, pause: float) -> None:
    with (
        seats(bench, folder) as both,
        bench.cluster.watching("jobs.batch", bench.namespace, folder / "jobs.json") as seen,
    ):
        both[0].start()
        both[0].wait_works()
        both[1].start()
        burst = Burst(bench, jobs, pause)
        burst.start()
        took = in_turns(both, kills, kill)
        burst.wait_running()
        judge(bench, seen)
        print(f"takeovers after a kill: {', '.join(f'{seconds:.1f}' for seconds in took)} s")
        assert bench.get(LEASES, named(bench.namespace))["spec"]["leaseTransitions"] == kills


@pytest.mark.slow
def test_a_leader_killed_four_times_in_a_burst_costs_no_job_and_makes_none_twice(
    bench: Bench, tmp_path: Path
) -> None:
    storm(bench, tmp_path, kills=4, jobs=40, pause=1.0)


@pytest.mark.soak
def test_a_leader_killed_twenty_times_in_a_burst_of_200(bench: Bench, tmp_path: Path) -> None:
    storm(bench, tmp_path, kills=20, jobs=200, pause=1.0)


def stop_until_another_leads(leader: Seat, follower: Seat) -> None:
    """It stands still, and goes on once the other leads: then it must write nothing, and end with
    one sentence."""
    leader.signal(signal.SIGSTOP)
    follower.wait_works()
    leader.signal(signal.SIGCONT)
    assert leader.wait() == 1
    log = leader.log.read_text()
    assert "leadership lost, ends and starts again as a follower: Lease" in log.splitlines()[-1]
    assert "Traceback" not in log, log


def test_a_follower_only_looks_and_a_leader_that_is_told_to_end_or_stands_still_is_followed(
    bench: Bench, tmp_path: Path
) -> None:
    with (
        seats(bench, tmp_path) as both,
        bench.cluster.watching("jobs.batch", bench.namespace, tmp_path / "jobs.json") as seen,
    ):
        first, second = both
        first.start()
        first.wait_works()
        second.start()
        second.wait_ready()
        burst = Burst(bench, 20, 1.0)
        burst.start()
        bench.wait("a few jobs", lambda: "run-2" in bench.get(GRPOJOBS).__repr__())
        quiet = second.page("metrics")[1].splitlines()
        assert "grpo_operator_leader 0.0" in quiet
        assert not [
            line
            for line in quiet
            if line.startswith(("grpo_jobs{", "grpo_job_")) or WRITE.search(line)
        ]
        scraped = first.scraped()
        since = time.monotonic()
        first.signal(signal.SIGTERM)
        second.wait_works()
        print(f"takeover after SIGTERM: {time.monotonic() - since:.1f} s, by its metric")
        print(
            second.metric("grpo_operator_takeover_seconds"),
            "s since the last sign of the leader before",
        )
        assert first.wait() == 0
        scraped.close()
        assert "is released" in first.log.read_text()
        first.start()
        in_turns((second, first), 1, stop_until_another_leads)
        burst.wait_running()
        judge(bench, seen)
        assert holder(bench) == "operator-0"


def test_a_leader_that_stood_still_before_any_write_is_refused_by_gate_and_fence(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stopped_writer.__name__
    for path, body in stopped_writer.things({**SPEC, **ONE_POD}):
        bench.post(path, body)
    with seats(bench, tmp_path) as (first, second):
        monkeypatch.setenv(stopped_writer.STOPS, "1")
        first.start(module)
        bench.wait(
            "the first to stand still",
            lambda: "leads" in first.log.read_text() and state(first) == "T",
        )
        monkeypatch.delenv(stopped_writer.STOPS)
        monkeypatch.setenv(stopped_writer.GO, str(tmp_path / "go"))
        second.start(module)
        bench.wait("the other to lead", lambda: "leads" in second.log.read_text())
        first.signal(signal.SIGCONT)
        first.wait()
        (tmp_path / "go").touch()
        assert second.wait() == 0, second.log.read_text()
    written, refused = outcomes(second), outcomes(first)
    assert set(written.values()) == {"done"}, written
    assert {kind: refused[kind] for kind in written} == dict.fromkeys(written, "gate")
    past = {kind: refused[f"past the gate, {kind}"] for kind in written}
    assert not [kind for kind, said in past.items() if FENCE not in said], past


def outcomes(seat: Seat) -> dict[str, str]:
    """What became of each kind of write; the log has other lines, such as a slow renewal's."""
    begins = stopped_writer.TOLD
    lines = [line for line in seat.log.read_text().splitlines() if line.startswith(begins)]
    return dict(line.removeprefix(begins).split(": ", 1) for line in lines)


def state(seat: Seat) -> str:
    """The process's state, as the kernel has it."""
    assert seat.process
    return Path(f"/proc/{seat.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
