"""One cache for several: ranks, pods and jobs fetch a repository once, and one that is killed is
replaced."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_trainer.gang import ranks
from grpo_trainer.hub.repositories import STALE_SECONDS, Hub, Lease, Repository
from grpo_trainer.runtime.clock import POLL_SECONDS
from grpo_trainer.runtime.errors import BadInput
from harness.programs.patience import wait_for_exit
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.support.ranks.gang import run_gang
from tests.support.ranks.launch import launch
from tests.trainer.hub import HubServer, hub_server, use

pytestmark = pytest.mark.realtime

MODEL = Repository("model", "team/model", None, "model")
FILES = {f"part-{number}.json": b"%d" % number * 4096 for number in range(6)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a model, and an empty cache."""
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        server.add("model", "team/model", FILES)
        yield server


def fetched(hub: HubServer) -> list[str]:
    """The files that were fetched, as often as they were."""
    return sorted(
        one.rsplit("/", 1)[1]
        for one in hub.requests
        if one.startswith("GET") and "/resolve/" in one
    )


def everything(_folder: Path, url: str, cache: str) -> dict[str, Any]:
    """On a rank: fetches the model."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, url, Path(cache))
        folder, commit = Hub().snapshot(MODEL, lambda fetch: fetch(["*.json"]))
    return {"commit": commit, "files": sorted(path.name for path in folder.iterdir())}


def slow() -> int:
    """A leader that is the later the higher its rank."""
    time.sleep(0.3 * ranks.rank())
    return ranks.rank()


def refused(_folder: Path, url: str, cache: str) -> dict[str, Any]:
    """On a rank: what becomes of a model that isn't there, and of a leader that is late."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, url, Path(cache))
        try:
            Hub().snapshot(
                Repository("model", "team/none", None, "model"), lambda fetch: fetch(["*.json"])
            )
        except BadInput as error:
            said = str(error)
    late = ranks.run_on_leader(ranks.rank(), slow)
    return {
        "said": said,
        "late": late,
        "main": ranks.run_on_rank0(lambda: f"rank {ranks.rank()}"),
    }


def test_the_ranks_of_a_pod_fetch_once(hub: HubServer, tmp_path: Path) -> None:
    scenario = f"{__name__}:everything"
    facts = run_gang(scenario, tmp_path / "gang", url=hub.url, cache=str(tmp_path / "cache"))
    assert (
        facts[0]
        == facts[1]
        == {"commit": hub.repositories["models/team/model"].main, "files": sorted(FILES)}
    )
    assert fetched(hub) == sorted(FILES)
    assert hub.requests.count("GET /api/models/team/model") == 1, "only rank 0 asks what main is"


def test_ranks_wait_for_their_leaders_and_fail_with_them(hub: HubServer, tmp_path: Path) -> None:
    facts = run_gang(
        f"{__name__}:refused", tmp_path / "gang", url=hub.url, cache=str(tmp_path / "cache")
    )
    assert facts[0]["said"] == facts[1]["said"]
    assert facts[0]["said"].startswith("rank 0: spec.model.name: team/none")
    assert [fact["late"] for fact in facts] == [0, 1]
    assert [fact["main"] for fact in facts] == ["rank 0", "rank 0"]


def test_jobs_that_share_a_cache_fetch_once(hub: HubServer, tmp_path: Path) -> None:
    """Jobs are processes here as in a cluster: huggingface_hub has one client per process, and
    whoever replaces it closes it under another thread's request."""
    logs = [tmp_path / f"job-{number}.log" for number in range(2)]
    arguments = [hub.url, str(tmp_path / "cache")]
    jobs = [launch("tests.trainer.hub_job", arguments, {}, log) for log in logs]
    for job, log in zip(jobs, logs, strict=True):
        assert wait_for_exit(job, 120) == 0, log.read_text()
    commit = hub.repositories["models/team/model"].main
    folder, _ = Hub({"model": commit}).snapshot(MODEL, lambda fetch: fetch(["*.json"]))
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert fetched(hub) == sorted(FILES)


def test_who_was_killed_while_fetching_is_replaced(hub: HubServer, tmp_path: Path) -> None:
    hub.held = "GET /team/model/resolve/"
    arguments = [hub.url, str(tmp_path / "cache")]
    process = launch("tests.trainer.hub_job", arguments, {}, tmp_path / "log")
    held = tmp_path / "cache" / "hub" / ".models--team--model.lease"
    while not fetched(hub):
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    process.kill()
    assert wait_for_exit(process, 60) == -signal.SIGKILL
    assert held.exists(), "it had no time to let go"
    assert list(held.parent.rglob("*.incomplete")), "nor to clean up"
    hub.release()
    clock = SteppedClock()
    folder, _ = Hub(clock=clock).snapshot(MODEL, lambda fetch: fetch(["*.json"]))
    assert STALE_SECONDS <= clock.now() <= STALE_SECONDS + POLL_SECONDS
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert not held.exists()
    assert not list(held.parent.rglob("*.incomplete"))


@given(st.lists(st.integers(1, int(STALE_SECONDS / POLL_SECONDS)), min_size=1, max_size=40))
@settings(max_examples=cases(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_holder_that_lives_is_waited_for_however_long(
    tmp_path: Path, silences: list[int]
) -> None:
    """`silences`: how many polls of the one that waits come between the holder's signs of life, and
    its end."""
    clock = SteppedClock()
    first, second = Lease(tmp_path / "a.lease"), Lease(tmp_path / "a.lease", clock)
    signs = iter([polls for silence in silences for polls in [False] * (silence - 1) + [True]])
    heard: list[int] = []
    assert not first.take(lambda: None)

    def live() -> None:
        sign = next(signs, None)
        if sign is None:
            first.release()
        elif sign:
            first.beat()

    clock.after_sleep = live
    assert not second.take(lambda: heard.append(1)), "nobody died"
    assert clock.now() == POLL_SECONDS * (sum(silences) + 1)
    assert len(heard) == len(silences) + 1, "its first sight, too"
    first.beat()
    first.release()
    assert second._is_ours, "the one before neither keeps nor ends what is another's"
    second.release()


@given(
    st.lists(st.sampled_from(["take", "beat", "release", "die"]), max_size=30),
    st.binary(max_size=20),
)
@settings(max_examples=cases(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_lease_is_free_again_whatever_its_holders_did(
    tmp_path: Path, story: list[str], rubbish: bytes
) -> None:
    path, clock = tmp_path / "a.lease", SteppedClock()
    path.write_bytes(rubbish)
    holder = Lease(path, clock)
    for what in story:
        if what == "take":
            holder = Lease(path, clock)
            holder.take(lambda: None)
        elif what == "die":
            holder = Lease(path, clock)
        else:
            getattr(holder, what)()
    last = Lease(path, clock)
    last.take(lambda: None)
    assert last._is_ours
    last.release()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_cache_that_can_not_be_written_is_bad_input(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "/hub-cache/hub")

    monkeypatch.setattr(Path, "mkdir", denied)  # tests run as root, whom no mode keeps out
    with pytest.raises(
        BadInput, match=rf"can't be kept: .*{os.strerror(number)}.* writable for the pods' user"
    ):
        Hub(clock=SteppedClock()).commit(MODEL)
