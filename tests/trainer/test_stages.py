"""What a run reports of its stage and of its waits, while a hub, a store or a service is away and
when it is back. The pauses are the product's, on a clock that they alone move."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.report.report import STEP_STAGES, Progress, Stage, WaitTarget
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.spec.rewards import HTTPReward
from grpo_trainer.gang.placement import Placement
from grpo_trainer.hub.repositories import Fetch, Hub, Repository
from grpo_trainer.hub.retry import bytes_in
from grpo_trainer.process.recorder import FETCH_PAUSE_SECONDS, Recorder
from grpo_trainer.rewards import http_service
from grpo_trainer.rewards.http_service import HTTPFunction
from grpo_trainer.rewards.reward_base import RewardCounters, Scores
from grpo_trainer.runtime.errors import StoreFailed
from grpo_trainer.stores.store_client import open_store
from harness.controlplane import free_port
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.support.ranks import runs
from tests.trainer.hub import hub_server, use
from tests.virtual_time import virtually

PLAN = runs.plan(Path("/models/demo"))


def recorded(clock: SteppedClock, stage: Stage = "Loading") -> Recorder:
    recorder = Recorder(1, Placement(0, 0, 1, 1), 0.0, clock.now)
    recorder.enter_stage(stage)
    return recorder


@pytest.mark.realtime
def test_a_hub_that_is_down_is_waited_for_by_name_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, looks = free_port(), list[Progress]()
    with ExitStack() as stack:

        def look() -> None:
            looks.append(recorder.progress)
            if clock.now() > 100 and not running:
                running.append(stack.enter_context(hub_server(port)))
                running[0].add("model", "team/model", {"config.json": b"{}"})

        clock, running = SteppedClock(look), list[Any]()
        recorder = recorded(clock)
        use(monkeypatch, f"http://127.0.0.1:{port}", tmp_path / "cache")
        on_wait = partial(recorder.record_wait, "Hub")
        hub = Hub({}, recorder.record_fetched_bytes, clock=clock, on_wait=on_wait)
        commit = hub.commit(Repository("model", "team/model", None, "model"))
    assert commit == running[0].repositories["models/team/model"].main
    waits = [look for look in looks if look.stage == "WaitingForHub"]
    assert all(look.waiting is not None for look in waits)
    longest = waits[-1].waiting
    assert longest is not None
    assert longest.seconds == pytest.approx(waits[-1].stage_seconds)
    assert longest.seconds >= 90
    assert (longest.target, longest.why) == ("Hub", f"connection refused by 127.0.0.1:{port}")
    assert recorder.progress.waiting is None
    assert recorder.progress.stage == "Loading"


def test_a_reward_service_that_is_down_is_named_until_it_answers() -> None:
    told: list[str] = []
    spec = HTTPReward.model_validate({"url": "http://judge/score"})
    function = HTTPFunction("judge", spec, RewardCounters(), None, told.append)

    async def post(_: Any, chunk: dict[str, Any], __: int) -> Scores:
        if asyncio.get_running_loop().time() < 40:
            raise http_service._Passing("ClientConnectorError: Connection refused")
        return [1.0 for _ in chunk["completions"]]

    vars(function)["_post"] = post
    virtually(function(prompts=["a"], completions=["a"]))
    assert set(told[:-2]) == {"connection refused by http://judge/score"}
    assert told[-2:] == ["", ""]


@pytest.mark.realtime
def test_a_store_that_is_down_is_named_until_it_is_given_up() -> None:
    told: list[str] = []

    def tell(problem: str = "") -> None:
        told.append(problem)

    url = f"http://127.0.0.1:{free_port()}"
    spec = ObjectStoreSpec(url="s3://bucket", endpoint=url)
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    store = open_store(spec, keys, tell, "run", SteppedClock()).within(5.0)
    with pytest.raises(StoreFailed):
        store.get("head")
    assert set(told[:-1]) == {"connection refused by s3://bucket/run"}
    assert told[-1] == ""


@pytest.mark.realtime
def test_a_download_s_size_is_known_once_the_hub_has_listed_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.json": b"{}", "model.safetensors": bytes(5000), "README.md": bytes(70)}
    totals: list[int] = []
    with hub_server() as server:
        server.add("model", "team/model", files)
        use(monkeypatch, server.url, tmp_path / "cache")
        hub = Hub(report_total=totals.append, clock=SteppedClock())
        repository = Repository("model", "team/model", None, "model")

        def choose(fetch: Fetch) -> Path:
            fetch(["config.json"])
            before = bytes_in(repository.storage)
            folder = fetch(["*.safetensors"])
            assert totals[-1] == before + 5000
            return folder

        hub.snapshot(repository, choose)
    assert totals[0] == 0
    assert totals[-1] <= bytes_in(repository.storage) <= totals[-1] + 500


def test_a_download_is_told_with_its_speed_and_ends_when_nothing_more_comes() -> None:
    clock = SteppedClock()
    recorder = recorded(clock)
    clock.advance(30)
    for arrived in range(0, 20_000, 1000):
        recorder.record_fetched_bytes(arrived)
        clock.advance(2)
    progress = recorder.progress
    assert (progress.stage, progress.fetched_bytes_per_second) == ("Downloading", 500)
    assert (progress.stage_seconds, progress.fetched_bytes) == (40.0, 19_000)
    clock.advance(FETCH_PAUSE_SECONDS)
    assert (recorder.progress.stage, recorder.progress.stage_seconds) == ("Loading", 80.0)
    assert recorder.progress.fetched_bytes_per_second == 0


def test_phases_of_a_step_are_stages_that_neither_the_watchdog_nor_events_see() -> None:
    clock = SteppedClock()
    recorder = recorded(clock)
    recorder.begin_training(0, 10)
    before = recorder.progress.events
    for phase, stage in (
        ("generate", "Generating"),
        ("reward", "Scoring"),
        ("forward", "Training"),
    ):
        recorder.enter_phase(phase)
        clock.advance(3)
        assert (recorder.progress.stage, recorder.progress.stage_seconds) == (stage, 3.0)
        assert recorder.current_stage == "Training"
    assert recorder.progress.events == before
    limits = {hang_timeout_seconds(stage, PLAN.guard, PLAN.execution) for stage in STEP_STAGES}
    assert len(limits) == 1


def test_the_longest_of_several_waits_is_told() -> None:
    clock = SteppedClock()
    recorder = recorded(clock, "Exporting")
    recorder.record_wait("Store", "s3: no answer in time")
    clock.advance(5)
    recorder.record_wait("Hub", "hub: no answer in time")
    clock.advance(5)
    recorder.record_wait("Store", "s3: the connection was cut")
    wait = recorder.progress.waiting
    assert wait is not None
    assert (wait.target, wait.seconds, wait.why) == ("Store", 10.0, "s3: the connection was cut")
    assert recorder.progress.stage == "Exporting", "only before it trains is the hub a stage"
    recorder.record_store_answer("")
    wait = recorder.progress.waiting
    assert wait is not None
    assert (wait.target, wait.seconds) == ("Hub", 5.0)


STEPS: dict[str, Callable[[Recorder], None]] = {
    "train": lambda recorder: recorder.begin_training(1, 9),
    "generate": lambda recorder: recorder.enter_phase("generate"),
    "step": lambda recorder: recorder.record_step(2, None, 1.0),
    "save": lambda recorder: recorder.enter_stage("Saving"),
    "load": lambda recorder: recorder.enter_stage("Loading"),
    "bytes": lambda recorder: recorder.record_fetched_bytes(7),
    "more bytes": lambda recorder: recorder.record_fetched_bytes(8),
    "hub is away": lambda recorder: recorder.record_wait("Hub", "away"),
    "hub is back": lambda recorder: recorder.record_wait("Hub", ""),
    "store is away": lambda recorder: recorder.record_store_answer("away"),
    "store is back": lambda recorder: recorder.record_store_answer(""),
}


@settings(max_examples=cases(100))
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.floats(0, 1e5)), max_size=20))
def test_whatever_happens_the_stage_has_a_name_and_no_time_is_negative(
    steps: list[tuple[str, float]],
) -> None:
    clock = SteppedClock()
    recorder = recorded(clock)
    away: set[WaitTarget] = set()
    for name, pause in steps:
        STEPS[name](recorder)
        for target in get_args(WaitTarget):
            if name == f"{target.lower()} is away":
                away.add(target)
            elif name == f"{target.lower()} is back":
                away.discard(target)
        clock.advance(pause)
        progress = Progress.model_validate_json(recorder.progress.model_dump_json())
        assert progress.stage in get_args(Stage)
        assert 0 <= progress.stage_seconds <= clock.now()
        assert (progress.waiting is None) == (not away)
        assert progress.waiting is None or progress.waiting.target in away
        assert (progress.stage == "Training") <= (recorder.current_stage == "Training")
