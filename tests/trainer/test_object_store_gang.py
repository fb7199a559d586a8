"""Two pods with a disk each and checkpoints on an object store only: killed at any request, cut
off, and gone on with to the last digit; nothing is left."""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_api.provenance.provenance import STATEMENT_FILE
from grpo_api.report.artifacts import SUMS
from grpo_api.report.report import Result
from grpo_api.text.contract import DATA_MOUNT_ENV
from grpo_trainer.checkpoints.store_checkpoints import is_read_by_ranks
from grpo_trainer.stores.run_store import StoredRun
from harness.programs.object_stores import BUCKET, serving
from tests.trainer.store_crashes import Strike, drawn, story
from tests.trainer.store_gang import CASE, Run, Whole, prepare, undisturbed
from tests.trainer.store_proxy import proxy_to

pytestmark = pytest.mark.realtime

PARTS, CRASHES = 4, 25
"""A hundred crashes."""
AT_MOST = 12
"""Strikes of one run."""
LAST_CHECKPOINT = f"/checkpoint-{CASE.steps}/"
"""In the words of requests: without it an attempt does not end, however late it is killed."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model and the data, for pods and for this process."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(DATA_MOUNT_ENV, str(folder))
        prepare(CASE, folder)
        yield folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Whole:
    """The run that nothing befalls."""
    return undisturbed(CASE, place)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A versitygw."""
    with serving("versitygw", tmp_path_factory.mktemp("store")) as served:
        yield served


def test_two_pods_without_a_volume_go_on_exactly_and_leave_a_model(
    endpoint: str, place: Path, whole: Whole
) -> None:
    run = Run(place, endpoint, "demo-0")
    with proxy_to(endpoint) as proxy:
        proxy.reset(lambda _, words: "cut before" if LAST_CHECKPOINT in words else "")
        with run.gang(1, proxy.url) as gang:
            gang.until(lambda: CASE.kill in gang.steps())
            for pod in gang.pods:
                pod.kill()
            run.ended(gang)
        proxy.reset()
        with run.gang(2, proxy.url) as gang:
            run.ended(gang)
            outcome = gang.outcome()
        asked = list(proxy.requests)
    killed, resumed = run.logged
    assert outcome.result is Result.SUCCEEDED, outcome
    assert min(resumed) == CASE.kill // CASE.save * CASE.save + 1
    assert {*killed, *resumed} == whole.steps.keys()
    assert outcome.export is not None
    assert outcome.export.path == f"s3://{BUCKET}/runs/demo-0/attempt-2/export"
    head = StoredRun(run.store).head()
    assert head is not None
    assert [(one.attempt, one.step) for one in head.checkpoints] == [(2, CASE.steps)]
    names = {
        key.removeprefix("attempt-2/export/") for key in run.store.object_sizes("attempt-2/export")
    }
    assert {"README.md", SUMS, STATEMENT_FILE} <= names, "what is told of the model is beside it"
    brought_once(asked)
    assert not list(place.glob("demo-0-2/disk-*/**/*.pt")), (
        "a pod's disk has a checkpoint only on its way"
    )
    run.require_exact(whole)
    run.require_nothing_left()


def brought_once(asked: list[str]) -> None:
    """Files of one rank were read by its node alone, all others by both."""
    parts = [words for words in asked if re.fullmatch(r"GET .*/checkpoint-\d+/.*\.\d{6}", words)]
    assert parts
    for words in set(parts):
        name = re.sub(r"^GET .*/checkpoint-\d+/|\.\d{6}$", "", words)
        nodes = sum(is_read_by_ranks(name, range(node, node + 1)) for node in range(2))
        assert parts.count(words) == nodes, words
    assert {
        is_read_by_ranks(re.sub(r"^GET .*/checkpoint-\d+/|\.\d{6}$", "", one), range(1))
        for one in parts
    } == {
        True,
        False,
    }


@pytest.mark.slow
def test_two_attempts_alive_at_once_on_a_slow_and_stormy_store(
    endpoint: str, place: Path, whole: Whole
) -> None:
    run = Run(place, endpoint, "demo-1")
    strikes = [
        Strike("head write", 2, "cut off", pace=(0.05, 2e6)),
        Strike("model", 1, "both after", stormy=True),
    ]
    assert story(run, strikes, random.Random(1)) == strikes
    run.require_exact(whole)
    run.require_nothing_left()


@pytest.mark.seeded
@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_crashes(
    endpoint: str, place: Path, whole: Whole, chance: random.Random, part: int
) -> None:
    own = random.Random(f"{chance.random()}/{part}")
    fallen: list[Strike] = []
    names = (f"storm-{part}-{number}" for number in itertools.count())
    while len(fallen) < CRASHES:
        run = Run(place, endpoint, next(names))
        fallen += story(run, [drawn(own) for _ in range(min(AT_MOST, CRASHES - len(fallen)))], own)
        run.require_exact(whole)
        run.require_nothing_left()
        print(f"{len(fallen)} crashes, {len(run.logged)} attempts of {run.name}", flush=True)
