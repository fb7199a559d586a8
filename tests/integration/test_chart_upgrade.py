"""Upgrade, rollback and upgrade again on a real API server: live jobs go on, waiting ones keep
their place.

The version before is real on both sides (tests/previous): its chart, whose definition has fewer
fields and which knows neither Lease nor fence, and its operator. Each operator is a process with
the identity of a pod, and the flags that the release's Deployment has for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_operator.records.names import FENCE
from harness.definitions import definition_change
from tests.integration.gpu_bench import GpuBench
from tests.integration.leader_bench import Seat
from tests.integration.operator_bench import GRPOJOBS
from tests.integration.test_chart import REGISTRY
from tests.integration.upgrade_bench import (
    CPU,
    LINE,
    NEW,
    OLD,
    Release,
    ended,
    populate,
    releasing,
    story,
    succeed,
)

pytestmark = pytest.mark.slow
# A preflight would add a Job to each job that waits, and the old version has none.
NEW_VALUES = (*REGISTRY, "--set=preflight.enabled=false")


@contextmanager
def untouched(bench: GpuBench) -> Iterator[None]:
    """The jobs that were there before the block are as they were after it."""
    before = story(bench)
    yield
    after = story(bench)
    changes = {
        (name, part): (value, after[name].get(part))
        for name, parts in before.items()
        for part, value in parts.items()
        if after[name].get(part) != value
    }
    assert not changes


def upgraded(bench: GpuBench, release: Release, old: Seat) -> Seat:
    """Brings the new version, as a rollout does: the definition first, then the operator, and the
    old one's end last.

    Until the new one leads the old one works on, with jobs that have fields which it doesn't know;
    then the fence refuses its writes. A job that is submitted before the old operator's watch has
    ended is a job of the old version.
    """
    with definition_change(bench.cluster):
        release.helm("upgrade", str(NEW.chart), *NEW_VALUES)
    assert release.fenced
    bench.submit("between", **CPU)
    bench.want("last", 8, nodes=2)
    told = ("InvalidSpec", "InvalidSpec")
    bench.wait(
        "the old operator's word", lambda: (reason(bench, "between"), reason(bench, "last")) == told
    )
    new = release.operator(NEW)
    new.wait_works()
    bench.wait_running("between")
    bench.patch(GRPOJOBS, "suspended", {"metadata": {"labels": {"touched": "yes"}}})
    bench.wait("the old operator to be refused", lambda: FENCE in old.log.read_text())
    ended(old)
    return new


def reason(bench: GpuBench, name: str) -> str:
    return bench.condition("Admitted", name)[1]


def test_live_jobs_go_on_and_the_line_keeps_its_order_through_upgrade_rollback_and_upgrade(
    gpu_bench: GpuBench, tmp_path: Path
) -> None:
    bench = gpu_bench
    with (
        releasing(bench, tmp_path) as release,
        bench.cluster.watching("jobs.batch", bench.namespace, tmp_path / "jobs.json") as seen,
    ):
        with definition_change(bench.cluster):
            release.helm("install", str(OLD.chart))
        old = release.operator(OLD)
        populate(bench)
        with untouched(bench):
            new = upgraded(bench, release, old)
        next_in_line(bench, "holds", LINE)
        restarts(bench, "steady")

        with untouched(bench):
            with definition_change(bench.cluster):
                release.helm("rollback", "1")
            # The roles of the old chart have other names.
            ended(new, has_lost_rights=True)
            old = release.operator(OLD)
            handled(bench, "under-the-old-again")
        assert not release.fenced
        next_in_line(bench, "first", LINE[1:])
        restarts(bench, "between")

        with untouched(bench):
            with definition_change(bench.cluster):
                release.helm("upgrade", str(NEW.chart), *NEW_VALUES)
            ended(old)
            new = release.operator(NEW)
            handled(bench, "under-the-new-again")
        next_in_line(bench, "second", LINE[2:])
        restarts(bench, "under-the-old-again")
        made = [item["metadata"] for item in seen()]
        assert len({meta["uid"] for meta in made}) == len({meta["name"] for meta in made}), (
            "no Job was made twice"
        )


def handled(bench: GpuBench, name: str) -> None:
    """Waits until an operator that has just come has looked at all jobs: one that comes later
    runs."""
    bench.submit(name, **CPU)
    bench.wait_running(name)


def next_in_line(bench: GpuBench, holder: str, line: tuple[str, ...]) -> None:
    """The job that has the GPUs succeeds; the first in the line gets them, and all others wait
    on."""
    succeed(bench, holder)
    bench.wait_running(line[0])
    assert [bench.status(name)["phase"] for name in (*line[1:], "last")] == ["Queued"] * len(line)


def restarts(bench: GpuBench, name: str) -> None:
    """A pod of a first attempt, which an operator of the other version started, fails: there is a
    second one."""
    bench.end(bench.pods(name)[0], 1)
    bench.wait_running(name, 2)
    assert bench.status(name)["restarts"] == 1
