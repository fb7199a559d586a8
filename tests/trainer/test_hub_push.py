"""An export is pushed to the stand-in hub (hub.py, hub_uploads.py) by the real client, whatever
happens meanwhile.

The stand-in has no xet store, so the client sends large files as git LFS does: pushing through xet
is untested.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.hf_api import RepoFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_api.provenance.provenance import ENVELOPE_FILE, STATEMENT_FILE
from grpo_api.report.root_cause import PERMANENT
from grpo_api.spec.checkpoint import HubExportSpec
from grpo_api.text.contract import EXPORT_TOKEN_ENV
from grpo_trainer.hub import hub_client
from grpo_trainer.hub import push as pushing
from grpo_trainer.hub.retry import ReportByteCount
from grpo_trainer.runtime.clock import LONGEST_PAUSE, LONGEST_WAIT
from grpo_trainer.runtime.errors import BadInput, HubUnavailable, classify_error
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.trainer.hub import LOST, PASSING, Repository, files_of
from tests.trainer.hub_uploads import FIRST_COMMIT, READER, WritableHub, writable_hub_in_use

pytestmark = pytest.mark.realtime

NAME = "models/team/out"
PASSES = [fault for fault in PASSING if fault != "429 later"]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A folder as an export leaves it: one file that is sent whole, one in parts, and small
    ones."""
    folder = tmp_path / "export"
    (folder / "extra").mkdir(parents=True)
    noise = random.Random(0)
    (folder / "model-1.safetensors").write_bytes(noise.randbytes(5_000))
    (folder / "model-2.safetensors").write_bytes(noise.randbytes(50_000))
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "extra" / "names.txt").write_text("ü\n", encoding="utf-8")
    (folder / "README.md").write_text("---\ntags:\n- grpo\n---\n\n# it\n", encoding="utf-8")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    """An empty hub, and a token that may write to it."""
    with writable_hub_in_use(monkeypatch, tmp_path / "cache") as server:
        yield server


def spec(private: bool = True) -> HubExportSpec:
    return HubExportSpec.model_validate(
        {
            "repository": "team/out",
            "private": private,
            "tokenSecretRef": {"name": "hub", "key": "token"},
        }
    )


def push(
    folder: Path,
    *,
    private: bool = True,
    told: list[int] | None = None,
    only_copy: bool = False,
    clock: SteppedClock | None = None,
) -> str:
    tell = (lambda _: None) if told is None else told.append
    return pushing.push_folder(
        folder,
        spec(private),
        "six steps",
        tell,
        is_only_copy=only_copy,
        clock=clock or SteppedClock(),
    )


def require_target(tell: ReportByteCount = lambda _: None) -> None:
    pushing.require_target(spec(), tell, SteppedClock())


def made(hub: WritableHub) -> Repository:
    return hub.repositories[NAME]


def assert_pushed_once(hub: WritableHub, folder: Path, commit: str) -> None:
    repository = made(hub)
    assert repository.main == commit
    assert repository.commits[commit] == FIRST_COMMIT | files_of(folder)
    assert len(repository.commits) == 2, "the one that made the repository, and ours"


def test_a_model_is_pushed_in_one_commit_to_a_private_repository(
    hub: WritableHub, export: Path
) -> None:
    told: list[int] = []
    require_target(told.append)
    assert (made(hub).private, len(made(hub).commits)) == (True, 1)
    assert_pushed_once(hub, export, push(export, told=told))
    assert max(told) == 55_000, "each file that goes out is a sign of life"
    assert sum("/store/" in request for request in hub.requests) == 4, (
        "one file whole, one in three parts"
    )


def test_a_public_repository_is_made_only_if_asked_for(hub: WritableHub, export: Path) -> None:
    push(export, private=False)
    assert not made(hub).private
    with pytest.raises(BadInput, match=r"team/out is public on the hub.*set private to false"):
        require_target()
    with pytest.raises(BadInput, match="is public on the hub"):
        push(export)
    assert len(made(hub).commits) == 2


@given(st.lists(st.sampled_from(["", "", LOST, *PASSES]), max_size=30))
@settings(
    max_examples=cases(12, gate=4), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_passes_there_is_one_commit(
    hub: WritableHub, export: Path, faults: list[str]
) -> None:
    hub.repositories.clear()
    hub.uploads.objects.clear()
    hub.faults = list(faults)
    assert_pushed_once(hub, export, push(export))


@pytest.mark.parametrize(
    "every", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["every fourth", "each"]
)
@pytest.mark.parametrize("done", [False, True], ids=["lost", "done"])
def test_an_attempt_that_ends_at_any_request_leaves_all_or_nothing(
    hub: WritableHub, export: Path, monkeypatch: pytest.MonkeyPatch, done: bool, every: int
) -> None:
    """`done`: whether the request that is the attempt's last one is carried out."""
    send, left = hub_client.Client.send, [0]

    def dying(self: hub_client.Client, request: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and done:
            send(self, request, **options)
        if left[0] == 0:
            raise Killed
        return send(self, request, **options)

    monkeypatch.setattr(hub_client.Client, "send", dying)
    for last in range(1, 100, every):
        hub.repositories.clear()
        hub.uploads.objects.clear()
        left[0] = last
        try:
            commit = push(export)
        except Killed:
            seen = made(hub).commits[made(hub).main] if NAME in hub.repositories else FIRST_COMMIT
            assert seen in (FIRST_COMMIT, FIRST_COMMIT | files_of(export)), "nothing is seen half"
            commit = push(export)
        assert_pushed_once(hub, export, commit)
        if left[0] > 0:
            break
    assert last > 15, "it ended at each of its requests"


def test_a_file_that_went_out_is_not_sent_again(hub: WritableHub, export: Path) -> None:
    push(export)
    hub.repositories.clear()
    hub.uploads.objects.clear()
    hub.faults = [""] * next(i for i, one in enumerate(hub.requests) if "/commit/" in one) + ["503"]
    hub.requests.clear()
    assert_pushed_once(hub, export, push(export))
    assert sum(one.startswith("PUT") for one in hub.requests) == 4, (
        "the second try found them on the hub"
    )


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("hf_unknown", r"repository: team/out can't be written: the hub doesn't know the token"),
        (READER, r"team/out can't be written: the token has no right to write there \(HTTP 403"),
        (" ", r"Secret of spec\.export\.hub\.tokenSecretRef \(hub, key token\) has no token"),
    ],
)
def test_a_token_without_the_right_is_found_before_training(
    hub: WritableHub, export: Path, monkeypatch: pytest.MonkeyPatch, token: str, says: str
) -> None:
    monkeypatch.setenv(EXPORT_TOKEN_ENV, token)
    there = Repository("model", private=True, uploaded=True)
    there.push(FIRST_COMMIT)
    for existing in ({}, {NAME: there}):
        hub.repositories |= existing
        hub.requests.clear()
        with pytest.raises(BadInput, match=says):
            require_target()
        assert len(hub.requests) < 6, "not asked again and again"
        with pytest.raises(BadInput, match=says):
            push(export)


def test_without_a_hub_there_is_no_push(hub: WritableHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        require_target()


def test_a_hub_that_stays_away_is_left_sooner_if_the_model_is_safe(
    hub: WritableHub, export: Path
) -> None:
    clock = SteppedClock()
    hub.faults = ["503"] * 1000
    with pytest.raises(HubUnavailable, match=r"team/out: .*HTTP 503") as caught:
        push(export, clock=clock)
    assert classify_error(caught.value)[0] not in PERMANENT
    assert LONGEST_WAIT - LONGEST_PAUSE <= clock.now() <= LONGEST_WAIT
    hub.faults = ["503"] * 40
    clock = SteppedClock()
    assert_pushed_once(hub, export, push(export, only_copy=True, clock=clock))
    assert clock.now() > LONGEST_WAIT


@pytest.mark.parametrize("refused", ["_commit", "_complete"])
def test_a_hub_that_takes_all_but_one_request_is_left(
    hub: WritableHub, export: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def require_end() -> None:
        assert clock.now() <= LONGEST_WAIT + pushing.MOST_TIMES * LONGEST_PAUSE

    monkeypatch.setattr(hub.uploads, refused, lambda *_: (503, {}, b""))
    clock = SteppedClock(require_end)
    with pytest.raises(HubUnavailable, match=r"team/out: .*HTTP 503"):
        push(export, clock=clock)


def test_the_hub_says_how_long_to_wait(hub: WritableHub, export: Path) -> None:
    clock = SteppedClock()
    hub.faults = ["429 later"]
    push(export, clock=clock)
    assert clock.now() == 2.0


def test_another_commit_meanwhile_stays(hub: WritableHub, export: Path) -> None:
    require_target()
    others = FIRST_COMMIT | {"notes.txt": b"mine"}

    def interfere() -> None:
        hub.uploads.before_commit = lambda: None
        made(hub).push(others)

    hub.uploads.before_commit = interfere
    commit = push(export)
    assert made(hub).commits[commit] == others | files_of(export)


def test_a_former_model_leaves_no_weights_behind(hub: WritableHub, export: Path) -> None:
    require_target()
    former = {
        "model-3.safetensors": b"old",
        "pytorch_model.bin": b"old",
        "adapter_config.json": b"{}",
    }
    theirs = {"LICENSE": b"MIT", "other/model.safetensors": b"theirs", "config.json": b"{}"}
    made(hub).push(FIRST_COMMIT | former | theirs)
    assert made(hub).commits[push(export)] == FIRST_COMMIT | theirs | files_of(export)


def test_an_empty_file_in_the_repository_is_not_the_exports(export: Path) -> None:
    files = pushing.Files.from_folder(export, lambda: None)
    git_name_of_nothing = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    empty = RepoFile(path="config.json", size=0, oid=git_name_of_nothing)  # type: ignore[no-untyped-call]
    assert "config.json" in files.differing_names({"config.json": empty})


def test_what_a_gitignore_leaves_out_is_told(hub: WritableHub, export: Path) -> None:
    require_target()
    made(hub).push({".gitignore": b"config.json\n"})
    with pytest.raises(BadInput, match=r"has not the exported config\.json; a \.gitignore"):
        push(export)


def test_the_hub_has_what_the_attempt_that_succeeded_says_of_the_model(
    hub: WritableHub, export: Path
) -> None:
    (export / STATEMENT_FILE).write_text('{"attempt": 1}', encoding="utf-8")
    first = push(export)
    assert push(export) == first
    (export / STATEMENT_FILE).write_text('{"attempt": 2}', encoding="utf-8")
    assert made(hub).commits[push(export)] == FIRST_COMMIT | files_of(export)


def test_a_signature_of_a_former_model_does_not_stay_beside_another(
    hub: WritableHub, export: Path
) -> None:
    (export / STATEMENT_FILE).write_text("{}", encoding="utf-8")
    (export / ENVELOPE_FILE).write_text("{}", encoding="utf-8")
    push(export)
    (export / ENVELOPE_FILE).unlink()
    assert made(hub).commits[push(export)] == FIRST_COMMIT | files_of(export)


def test_a_commit_that_a_server_of_the_hub_does_not_know_yet_is_asked_for_again(
    hub: WritableHub, export: Path
) -> None:
    push(export)
    position = max(i for i, one in enumerate(hub.requests) if "/tree/" in one)
    hub.repositories.clear()
    hub.uploads.objects.clear()
    hub.faults = [""] * position + ["404"]
    assert_pushed_once(hub, export, push(export))


@pytest.mark.parametrize("fault", ["403", "400"])
def test_a_link_that_has_run_out_is_asked_for_again(
    hub: WritableHub, export: Path, fault: str
) -> None:
    push(export)
    position = next(i for i, one in enumerate(hub.requests) if one.startswith("PUT"))
    hub.repositories.clear()
    hub.uploads.objects.clear()
    hub.faults = [""] * position + [fault]
    assert_pushed_once(hub, export, push(export))
