"""Two versions of the product on one cluster: each one's chart by Helm, each one's operator in the
place of its pod.

Jobs of every kind stand under them: what runs, what waits, what is over.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_api.text.contract import GROUP, LEADER_PLURAL, PLURAL
from harness.fixtures import AnyCluster
from tests import version_before
from tests.integration.gpu_bench import GpuBench
from tests.integration.leader_bench import CHART, ROOT, Seat, named
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, Object, outcome

DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
CPU: Object = {"placement": {"accelerator": "CPU", "nodes": 1}}
LINE = ("first", "second", "third")
"""Jobs that want all GPUs, in the order in which they came."""


@dataclass(frozen=True)
class Version:
    """What a release consists of; the code is a folder or an archive."""

    name: str
    chart: Path
    code: Path


OLD = Version("old", version_before.CHART, version_before.CODE)
NEW = Version("new", CHART, ROOT / "operator")


class Release:
    """A Helm release with the name of the bench's namespace, in it."""

    def __init__(self, bench: GpuBench, folder: Path) -> None:
        """Nothing is installed yet; the folder is for logs."""
        self._bench, self._folder = bench, folder
        self._seats: list[Seat] = []

    def helm(self, command: str, *arguments: str) -> None:
        """A command of Helm on the release."""
        self._bench.cluster.helm(
            command, self._bench.namespace, *arguments, "--namespace", self._bench.namespace
        )

    def operator(self, version: Version) -> Seat:
        """Starts an operator of that version with the flags that the release's Deployment has for
        it now."""
        seat = Seat(self._bench, f"{version.name}-{len(self._seats)}", self._folder)
        self._seats.append(seat)
        deployment = self._bench.get(DEPLOYMENTS, named(self._bench.namespace))
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        seat.run("grpo_operator", (version.code,), *container["args"])
        seat.wait_ready()
        return seat

    @property
    def fenced(self) -> bool:
        """Whether the API server has the release's policies."""
        policies = self._bench.client.get(POLICIES)["items"]
        return any(
            one["metadata"]["name"].startswith(named(self._bench.namespace)) for one in policies
        )

    def end(self) -> None:
        """Ends its operators and takes it away."""
        for seat in self._seats:
            seat.end()
        self.helm("uninstall", "--ignore-not-found")

    def logs(self) -> str:
        """The ends of what its operators say."""
        return "\n".join(f"{seat.name}: {seat.log.read_text()[-3000:]}" for seat in self._seats)


def forget_definitions(cluster: AnyCluster) -> None:
    """Takes the definitions away that another release, or none, has left: Helm upgrades its own
    alone."""
    cluster.kubectl(
        "delete", "crd", f"{PLURAL}.{GROUP}", f"{LEADER_PLURAL}.{GROUP}", "--ignore-not-found"
    )


@contextmanager
def releasing(bench: GpuBench, folder: Path) -> Iterator[Release]:
    """A release of which nothing is left in the end but the definitions."""
    forget_definitions(bench.cluster)
    release = Release(bench, folder)
    try:
        yield release
    except Exception as error:
        raise AssertionError(release.logs()) from error
    finally:
        release.end()


def ended(seat: Seat, *, has_lost_rights: bool = False) -> None:
    """Ends an operator as a kubelet does, whose turn comes once another pod is ready.

    One that has lost its rights on the Lease ends by itself when it should have renewed it.
    """
    seat.signal(signal.SIGTERM)
    code = seat.wait()
    has_lost_lease = "leadership lost" in seat.log.read_text()
    assert code == 0 or (has_lost_rights and has_lost_lease)


def populate(bench: GpuBench) -> None:
    """Submits a job for each way to stand, and waits until it stands so."""
    bench.submit("live")
    bench.submit("steady", **CPU)
    bench.submit("done", **CPU)
    bench.submit("failed", **CPU)
    bench.submit("suspended", suspend=True)
    bench.want("holds", 8, nodes=2)
    bench.end(bench.wait_running("live")[1], 137, reason="OOMKilled")
    bench.wait_running("live", 2)
    succeed(bench, "done")
    bench.end(
        bench.wait_running("failed")[0],
        41,
        outcome("BadInput", attempt=1, message="no such column"),
    )
    bench.wait_phase("Failed", "failed")
    bench.wait_running("holds")
    bench.wait_running("steady")
    for name in LINE:
        time.sleep(1.0)  # creation times, by which the line is ordered, have whole seconds
        bench.want(name, 8, nodes=2)
        bench.wait_phase("Queued", name)
    bench.wait_phase("Suspended", "suspended")


def succeed(bench: GpuBench, name: str) -> None:
    """Lets the first attempt of a job end well."""
    for pod in bench.wait_running(name):
        bench.end(pod, 0, outcome("Succeeded", attempt=1, step=3))
    bench.wait_phase("Succeeded", name)


def story(bench: GpuBench) -> dict[str, Object]:
    """What no change of versions may touch, by GRPOJob: where it stands and since when, its Jobs
    and their pods."""
    jobs, pods = bench.get(JOBS)["items"], bench.get(PODS)["items"]
    found = {}
    for item in bench.get(GRPOJOBS)["items"]:
        owned_jobs = _owned(jobs, item)
        known = {
            "jobs": _identities(owned_jobs),
            "pods": [_identities(_owned(pods, job)) for job in owned_jobs],
        }
        found[item["metadata"]["name"]] = _standing(item["status"]) | known
    return found


_KEPT = ("phase", "attempt", "restarts", "startTime", "completionTime", "ends", "outcome", "jobUid")


_CONDITIONS = ("Admitted", "Planned", "Scheduled", "Running", "Suspended", "Succeeded", "Failed")
"""The conditions that both versions have."""


def _standing(status: Object) -> Object:
    since = {
        one["type"]: (one["status"], one["lastTransitionTime"])
        for one in status["conditions"]
        if one["type"] in _CONDITIONS
    }
    return {name: status[name] for name in _KEPT if name in status} | {"conditions": since}


def _owned(items: list[Object], owner: Object) -> list[Object]:
    uid = owner["metadata"]["uid"]
    return [
        one
        for one in items
        if uid in [by["uid"] for by in one["metadata"].get("ownerReferences", [])]
    ]


def _identities(items: list[Object]) -> dict[str, tuple[str, str]]:
    """uid and, of pods, phase by name."""
    return {
        one["metadata"]["name"]: (one["metadata"]["uid"], one["status"].get("phase", ""))
        for one in items
    }
