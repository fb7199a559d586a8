"""A cache is filled before the job: the same files as it will ask for, once, and from where the
last try ended."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.rewards import RewardSpec
from grpo_api.text.contract import PLAN_ENV, TERMINATION_LOG_ENV
from grpo_trainer import prefetch
from grpo_trainer.data.row_sources import read_hub
from grpo_trainer.hub.repositories import Hub
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.weights.model_files import locate_model
from harness.programs.patience import wait_for_exit
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs
from tests.support.ranks.launch import launch
from tests.trainer.hub import PASSING, Files, HubServer, environment, files_of, hub_server, use

pytestmark = pytest.mark.realtime

ROWS = b'{"prompt": "say 1"}\n' * 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """A policy in several files, with a pickle that nobody needs, and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    policy = files_of(demo_model.save_policy(folder / "policy", shard="100KB"))
    judge = files_of(demo_model.save_reward_model(folder / "judge"))
    assert sum(name.endswith(".safetensors") for name in policy) > 1
    return {"team/model": policy | {"pytorch_model.bin": b"never"}, "team/judge": judge}


@pytest.fixture
def hub(
    models: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    """A hub with both and a dataset, and an empty cache."""
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        fill(server, models)
        yield server


def fill(server: HubServer, models: dict[str, Files]) -> None:
    for name, files in models.items():
        server.add("model", name, files)
    server.add("dataset", "team/rows", {"train.jsonl": ROWS})


def plan(
    model: str = "team/model", judge: str = "team/judge", dataset: str = "team/rows"
) -> TrainingPlan:
    rewards = [{"format": {"pattern": "a"}}, {"model": {"name": judge}}]
    changes = {
        "rewards": [RewardSpec.model_validate(one) for one in rewards],
        "dataset": DatasetSpec(name=dataset),
    }
    return TrainingPlan.model_validate(
        runs.plan(Path(model)).model_copy(update=changes).model_dump()
    )


def fetched(hub: HubServer) -> list[str]:
    """The files whose content was asked for."""
    return [one for one in hub.requests if one.startswith("GET") and "/resolve/" in one]


def load(job: TrainingPlan, commits: dict[str, str]) -> None:
    """All that the job's first attempt fetches, with what the cache's filler found."""
    hub = Hub(commits, clock=SteppedClock())
    for repository in prefetch._models(job.model, job.rewards):
        locate_model(repository, job.execution.dtype, hub)
    read_hub(job.dataset, hub)


def test_the_job_finds_everything_and_asks_the_hub_nothing_any_more(hub: HubServer) -> None:
    outcome = prefetch.fetch_inputs(plan(), SteppedClock())
    assert outcome.message == "in the cache: team/model, team/judge, team/rows"
    assert outcome.revisions == {
        "model": hub.repositories["models/team/model"].main,
        "rewards[1].model": hub.repositories["models/team/judge"].main,
        "dataset": hub.repositories["datasets/team/rows"].main,
    }
    assert not any("pytorch_model.bin" in one for one in hub.requests)
    hub.requests.clear()
    load(plan(), {})
    assert fetched(hub) == []
    hub.requests.clear()
    load(plan(), outcome.revisions)
    assert hub.requests == []


def test_folders_are_left_where_they_are(hub: HubServer) -> None:
    outcome = prefetch.fetch_inputs(plan("/models/policy", "/rewards/1", "/data"))
    assert (outcome.message, outcome.revisions, hub.requests) == (
        "in the cache: nothing to fetch",
        {},
        [],
    )


@settings(
    max_examples=cases(6, gate=2), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(faults=[], tries=[13, 11, 18])
@given(
    faults=st.lists(st.sampled_from(["", *PASSING]), max_size=12),
    tries=st.lists(st.integers(0, 20), max_size=3),
)
def test_however_the_hub_fails_and_wherever_it_is_ended_the_next_try_completes_it(
    models: dict[str, Files],
    tmp_path_factory: pytest.TempPathFactory,
    faults: list[str],
    tries: list[int],
) -> None:
    """`tries`: after how many requests each earlier try was refused for good."""
    with pytest.MonkeyPatch.context() as patch, hub_server() as server:
        use(patch, server.url, tmp_path_factory.mktemp("cache"))
        fill(server, models)
        for passed in tries:
            server.faults = [*[""] * passed, *["401"] * 5]
            _try(plan())
        server.faults = list(faults)
        prefetch.fetch_inputs(plan(), SteppedClock())
        server.requests.clear()
        server.faults = []
        assert (
            prefetch.fetch_inputs(plan(), SteppedClock()).message
            == "in the cache: team/model, team/judge, team/rows"
        )
        load(plan(), {})
        assert fetched(server) == []


def _try(job: TrainingPlan) -> None:
    """One that may be refused. In a pod it is a process of its own: what datasets' file system
    remembers of a refusal ends with it."""
    try:
        prefetch.fetch_inputs(job, SteppedClock())
    except BadInput:
        HfFileSystem.clear_instance_cache()


def test_what_is_there_is_not_fetched_again_after_a_refusal(
    hub: HubServer, models: dict[str, Files]
) -> None:
    judge = hub.repositories.pop("models/team/judge")
    with pytest.raises(BadInput, match=r"spec.rewards\[1\].model.name: team/judge"):
        prefetch.fetch_inputs(plan(), SteppedClock())
    hub.repositories["models/team/judge"] = judge
    hub.requests.clear()
    prefetch.fetch_inputs(plan(), SteppedClock())
    assert fetched(hub)
    assert not any("team/model" in one for one in fetched(hub))


def run_main(job: TrainingPlan, folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, Outcome]:
    """The module's entry point as in a pod: exit code and termination message."""
    (folder / "plan.json").write_text(job.model_dump_json(by_alias=True))
    patch.setenv(PLAN_ENV, str(folder / "plan.json"))
    patch.setenv(TERMINATION_LOG_ENV, str(folder / "termination"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = prefetch.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, Outcome.model_validate_json((folder / "termination").read_text())


@pytest.mark.parametrize(
    ("model", "result"),
    [("team/model", Result.SUCCEEDED), ("team/nothing", Result.BAD_INPUT)],
    ids=["there", "not"],
)
def test_the_end_is_told_by_the_exit_code_and_an_outcome(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, result: Result
) -> None:
    code, outcome = run_main(plan(model), tmp_path, monkeypatch)
    assert (code, outcome.result) == (EXIT_CODES[result], result)
    assert model in outcome.message


def test_progress_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    told = prefetch.Progress(clock)
    told.begin_repository("a model")
    for count, pause in ((1, 1.0), (2, 3.9), (3, 0.1), (4_000_000, 25.0), (5_000_000, 0.0)):
        told.report_byte_count(count)
        clock.advance(pause)
    assert caplog.messages == [
        f"a model: {amount} MB in the cache" for amount in ("0.0", "4.0", "5.0")
    ]


def test_a_pod_that_is_deleted_ends_and_lets_go_of_the_lease(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.held = "/resolve/"
    (tmp_path / "plan.json").write_text(plan().model_dump_json(by_alias=True))
    variables = environment(hub.url, tmp_path / "cache") | {PLAN_ENV: str(tmp_path / "plan.json")}
    process = launch("grpo_trainer.prefetch", [], variables, tmp_path / "log", fresh=True)
    try:
        while not any(hub.held in one for one in hub.requests):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        hub.release()
        assert wait_for_exit(process, 60) == EXIT_CODES[Result.PREEMPTED], (
            tmp_path / "log"
        ).read_text()
    finally:
        process.kill()
        wait_for_exit(process, 60)
    assert list((tmp_path / "cache").rglob("*.lease")) == []
