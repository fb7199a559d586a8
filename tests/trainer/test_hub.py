"""The hub fails in every way that passes, and in those that don't: the real clients against hub.py.

The pauses are the product's, on a clock that they alone move. huggingface_hub never sleeps: its
retries never begin.
"""

import ast
import inspect
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import datasets
import hf_xet  # type: ignore[import-untyped]
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.report.root_cause import PERMANENT
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.training import TrainingSpec
from grpo_trainer.data.dataset import Prompts, load_prompts
from grpo_trainer.hub import retry
from grpo_trainer.hub.repositories import Hub, Repository
from grpo_trainer.hub.retry import ReportByteCount
from grpo_trainer.runtime.clock import LONGEST_PAUSE, LONGEST_WAIT
from grpo_trainer.runtime.errors import BadInput, DiskFailed, HubUnavailable, classify_error
from grpo_trainer.weights.model_files import Source, locate_model
from grpo_trainer.weights.models import load_policy
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs
from tests.trainer.hub import FOR_GOOD, PASSING, HubServer, files_of, hub_server, use

ROWS = b"question,answer\nsay 1,1\nsay 2,2\nsay 3,3\n"
CARD = (
    b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: "
    b"main/train.csv\n---\n"
)
pytestmark = pytest.mark.realtime

DATASET = {"README.md": CARD, "main/train.csv": ROWS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.save_policy(tmp_path_factory.mktemp("model"), shard="100KB")


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a model and a dataset, and an empty cache."""
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        server.add("model", "team/model", files_of(model))
        server.add("dataset", "team/rows", DATASET)
        yield server


def stepped(
    commits: Mapping[str, str] | None = None, tell: ReportByteCount = lambda _: None
) -> Hub:
    """A way to the hub whose waiting takes no time."""
    return Hub(commits or {}, tell, clock=SteppedClock())


def located(way: Hub | None = None) -> Source:
    return locate_model(
        Repository("model", "team/model", None, "model"), "float32", way or stepped()
    )


def prompts(way: Hub | None = None, /, **spec: str) -> Prompts:
    dataset = DatasetSpec.model_validate(
        {"name": "team/rows", "config": "main", "promptColumn": "question", **spec}
    )
    return load_prompts(
        dataset, TrainingSpec(prompts_per_step=1), tiny_tokenizer(), hub=way or stepped()
    )


def forget(tmp_path: Path) -> None:
    """An empty cache."""
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


FAULTS = st.lists(
    st.sampled_from(["", *(fault for fault in PASSING if fault != "429 later")]), max_size=20
)


@given(FAULTS)
@settings(
    max_examples=cases(12, gate=4), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_passes_is_waited_for(
    hub: HubServer, model: Path, tmp_path: Path, faults: list[str]
) -> None:
    forget(tmp_path)
    hub.faults = list(faults)
    source = located()
    assert source.revision == hub.repositories["models/team/model"].main
    assert files_of(source.folder) == files_of(model)


@given(FAULTS)
@settings(
    max_examples=cases(6, gate=2), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_dataset_is_the_same_whatever_passed_meanwhile(
    hub: HubServer, tmp_path: Path, faults: list[str]
) -> None:
    forget(tmp_path)
    hub.faults = list(faults)
    assert prompts().rows["prompt"][:] == ["say 1", "say 2", "say 3"]


@pytest.mark.parametrize("fault", FOR_GOOD)
@pytest.mark.parametrize(
    "requests_before",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_what_the_hub_refuses_is_bad_input_at_once(
    hub: HubServer, fault: str, requests_before: int
) -> None:
    hub.faults = [""] * requests_before + [fault] * 50
    with pytest.raises(
        BadInput, match=r"spec\.model\.name: team/model \(revision default\) can't be fetched"
    ):
        located()
    assert len(hub.requests) <= requests_before + 12, "not asked again and again"


@pytest.mark.parametrize("revision", ["v9", "0" * 40])
def test_a_missing_revision_is_bad_input(hub: HubServer, revision: str) -> None:
    for missing in (
        Repository("model", "team/model", revision, "model"),
        Repository("dataset", "team/rows", revision, "dataset"),
    ):
        named = "revision: .*'v9'; it has main" if revision == "v9" else f"name: .*{revision}"
        with pytest.raises(BadInput, match=rf"spec\.{missing.path}\.{named}"):
            stepped().snapshot(missing, lambda fetch: fetch(["*.json"]))


def test_a_hub_that_stays_away_is_left_after_a_while_and_the_gang_restarts(hub: HubServer) -> None:
    clock = SteppedClock()
    hub.faults = ["503"] * 1000
    with pytest.raises(
        HubUnavailable, match=r"team/model .*nothing arrived for .*HTTP 503"
    ) as caught:
        located(Hub(clock=clock))
    assert classify_error(caught.value)[0] not in PERMANENT
    assert LONGEST_WAIT - LONGEST_PAUSE <= clock.now() <= LONGEST_WAIT
    assert len(hub.requests) > LONGEST_WAIT / LONGEST_PAUSE, "it was tried again"


@pytest.mark.parametrize("trickling", ["/api/", "/resolve/"])
def test_a_hub_that_sends_a_few_bytes_now_and_then_is_left(hub: HubServer, trickling: str) -> None:
    hub.trickling = trickling
    way = Hub(clock=SteppedClock(), longest_wait=0.5, takes_leases=False)
    with pytest.raises(HubUnavailable, match=rf"{trickling}\S+: only \d+ bytes in \d+ s"):
        located(way)


@pytest.mark.parametrize("name", ["team/" + "m" * 300, "m" * 300])
def test_a_name_that_no_hub_has_is_bad_input_at_once(hub: HubServer, name: str) -> None:
    repository = Repository("model", name, None, "model")
    with pytest.raises(BadInput, match=r"^spec.model.name: .* can't be fetched: Repo id must"):
        locate_model(repository, "float32", Hub())
    assert hub.requests == []


def test_nobody_there_is_waited_for_too(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(HubUnavailable, match="ConnectError"):
        located()
    use(monkeypatch, "http://hub.invalid", tmp_path / "cache")
    with pytest.raises(HubUnavailable, match="ConnectError"):
        prompts()


def test_the_hub_says_how_long_to_wait(hub: HubServer) -> None:
    told: list[int] = []
    clock = SteppedClock()
    hub.faults = ["429 later"]
    located(Hub(report=told.append, clock=clock))
    assert clock.now() == 2.0, "Retry-After: 2"
    assert told[-1] > 0
    hub.faults = ["", "429 in an hour"]
    with pytest.raises(HubUnavailable, match=r"HTTP 429 .*, and asks for a pause of 3600 s"):
        prompts()


def test_a_full_disk_is_no_missing_model(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def full(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        if path.suffix == ".incomplete":
            raise OSError(28, "No space left on device", str(path))
        return real(path, mode, *rest, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(
        DiskFailed, match=r"no room left in .*models--team--model, \d+ bytes are free"
    ) as caught:
        located()
    assert classify_error(caught.value)[0] not in PERMANENT
    with pytest.raises(DiskFailed):
        prompts()


def test_what_is_there_needs_no_hub(hub: HubServer) -> None:
    first = stepped()
    before = (located(first), prompts(first))
    assert set(first.commits) == {"model", "dataset"}
    hub.requests.clear()
    again = stepped(first.commits)
    plan = runs.plan(Path("team/model"))
    assert load_policy(plan.model, plan.execution, plan.adapter, again).source == before[0]
    assert prompts(again).fingerprint == before[1].fingerprint
    assert hub.requests == []


def test_a_moved_main_changes_nothing_in_later_attempts(hub: HubServer, tmp_path: Path) -> None:
    first = stepped()
    before = (located(first).revision, prompts(first).fingerprint)
    other = demo_model.save_policy(tmp_path / "other", seed=1)
    assert hub.add("model", "team/model", files_of(other)) != before[0]
    hub.add("dataset", "team/rows", {**DATASET, "main/train.csv": ROWS.replace(b"say 1", b"say 9")})
    forget(tmp_path)
    later = stepped(first.commits)
    assert (located(later).revision, prompts(later).fingerprint) == before
    forget(tmp_path)
    assert located().revision != before[0], "a new job begins with what main is now"
    assert prompts().rows["prompt"][0] == "say 9"


def test_a_damaged_file_in_the_cache_is_fetched_again(hub: HubServer) -> None:
    source = located()
    shard = sorted(source.folder.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.resolve().write_bytes(whole[:100])
    assert (located().folder / shard.name).read_bytes() == whole


@pytest.mark.parametrize("damage", ["gone", "empty", "half"])
def test_rows_in_the_cache_that_a_crash_has_damaged_are_made_again(
    hub: HubServer, tmp_path: Path, damage: str
) -> None:
    before = prompts().fingerprint
    (state,) = (tmp_path / "cache" / "datasets" / "commits").rglob("state.json")
    for path in (state, *state.parent.glob("*.arrow")):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if damage == "half" else b"")
        if damage == "gone":
            path.unlink()
        assert prompts().fingerprint == before


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"config": "other"}, "config other"),
        ({"split": "validation"}, "split validation"),
        ({"name": "team/none"}, r"spec\.dataset\.name: team/none"),
    ],
)
def test_a_dataset_that_is_not_there_is_bad_input(
    hub: HubServer, spec: dict[str, str], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        prompts(None, **spec)


def test_offline_what_is_cached_is_all_there_is(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stepped()
    before = (located(first), prompts(first).fingerprint)
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert (located(), prompts().fingerprint) == before
    assert (located(stepped(first.commits)), prompts(stepped(first.commits)).fingerprint) == before
    forget(tmp_path)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        located()
    with pytest.raises(BadInput, match=r"team/rows.* can't be loaded"):
        prompts(stepped(first.commits))
    assert hub.requests == []


def test_a_token_of_the_store_that_has_run_out_passes() -> None:
    assert retry.passing_error(hf_xet.XetAuthenticationError("expired"))
    assert retry.passing_error(RuntimeError("the store did not answer"))
    assert (
        retry.passing_error(RuntimeError("Dataset scripts are no longer supported, but found a.py"))
        is None
    )
    assert retry.passing_error(PermissionError(13, "Permission denied")) is None


def test_a_pod_can_be_the_hub_with_nothing_but_python() -> None:
    module = ast.parse(Path(inspect.getfile(HubServer)).read_text())
    names = {
        alias.name for node in module.body if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {node.module or "" for node in module.body if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
