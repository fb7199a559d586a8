"""The whole story: a cluster, a storm of so many faults by a seed, a calm, and the judgement of
what was seen.

The same seed gives the same decisions in the same order; what they meet depends on the timing of
real processes.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from harness.client import ApiStatusError
from harness.cluster import Cluster
from harness.programs.processes import until
from harness.settings import ClusterSettings

from ..api_proxy import ApiProxy
from ..leader_bench import fenced, pod_token
from . import calm
from .accounts import audit, events_tell_what_was, surely_failed
from .faults import FAULTS
from .faults.base import Fault
from .history import UNKNOWN_PHASE
from .ledger import Ledger
from .observer import Observer
from .operator_process import NAMES, NAMESPACE, ROOT, Replicas
from .population import prepare, top_up
from .progress_server import ProgressServer
from .trainer import train
from .world import ALL_GRPOJOBS, EVENTS, World

LONGEST_PAUSE = 1.0
"""Seconds between two faults: shorter and longer than what an attempt takes to start."""
RECOVERY_SECONDS = 12.0
"""After a disturbance the operator and the controllers may pause so long between two tries."""
LULL_EVERY = 100
"""Faults after which all of them end for once, so that what is only slow can be told from what is
lost."""
TOKEN_HOURS = 24
"""Longer than any storm."""

Say = Callable[[str], None]


@dataclass
class Report:
    """What was done and what was seen."""

    seed: int
    only: str = ""
    struck: Counter[str] = field(default_factory=Counter)
    strikes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    jobs: int = 0
    attempts: int = 0
    certain: int = 0
    """Attempts of which it is known that they had to be counted as failures."""
    seconds: float = 0.0

    @property
    def faults(self) -> int:
        """How many faults struck."""
        return self.struck.total()

    def command(self) -> str:
        """What repeats it."""
        only = f" ONLY='{self.only}'" if self.only else ""
        return f"make chaos SEED={self.seed} FAULTS={self.faults}{only}"

    def table(self) -> str:
        """Faults by kind."""
        rows = [f"| {kind} | {count} |" for kind, count in sorted(self.struck.items())]
        return "\n".join(["| fault | times |", "|---|---|", *rows])


def storm(
    faults: int, seed: int, folder: Path, say: Say, only: str = "", *, fence: bool = True
) -> Report:
    """So many faults on a cluster of its own; `folder` keeps the operators' logs and kubeconfigs.

    only: a regular expression that the kinds of the faults must match.
    fence: the API server refuses what an operator writes that does not lead.
    """
    kinds = tuple(fault for fault in FAULTS if re.search(only, fault.kind))
    begun = time.monotonic()
    with standing(f"chaos-{seed}", folder, fence=fence) as (world, observer):
        world.create()
        prepare(world)
        report = Storm(world, observer, Report(seed, only), say, kinds).blow(faults)
    report.seconds = time.monotonic() - begun
    if report.violations:
        for line in _leader_changes(folder):
            say(line)
    return report


def _leader_changes(folder: Path) -> Iterator[str]:
    """Lines of the operators' logs on Leases and lost events: they explain most of what is
    missing."""
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if "Lease" in line or "not recorded" in line:
                yield f"{log.name}: {line}"


@contextmanager
def standing(name: str, folder: Path, *, fence: bool) -> Iterator[tuple[World, Observer]]:
    """A cluster without nodes, for the time of the block; operators that are started in it are
    killed at the end."""
    with Cluster.create(f"{name}-{time.time_ns() % 10**6}", ClusterSettings()) as cluster:
        _define(cluster)
        with (
            fenced(cluster, NAMESPACE, policies=fence),
            ApiProxy(cluster, folder).running() as proxy,
            ProgressServer().running() as progress,
        ):
            tokens = {name: pod_token(cluster, NAMESPACE, name, TOKEN_HOURS) for name in NAMES}
            kubeconfigs = {name: proxy.kubeconfig_of(name, token) for name, token in tokens.items()}
            operators = Replicas(kubeconfigs, folder, cluster.processes.environment("operator"))
            try:
                with Observer(cluster).watching() as observer:
                    yield World(cluster, proxy, progress, operators, Ledger()), observer
            finally:
                operators.kill()


def _define(cluster: Cluster) -> None:
    """GRPOJobs, with a phase that only a newer operator knows."""
    definition = yaml.load((ROOT / "crds" / "grpojob.yaml").read_text(), yaml.CSafeLoader)
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["status"]["properties"]["phase"]["enum"].append(UNKNOWN_PHASE)
    client = cluster.control_plane.client()
    client.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    until("GRPOJobs to be served", lambda: client.get(ALL_GRPOJOBS), 60)
    # its garbage collector looks for new kinds every half minute only
    cluster.control_plane.restart_controllers()


class Storm:
    """One run on a world that stands."""

    def __init__(
        self,
        world: World,
        observer: Observer,
        report: Report,
        say: Say,
        kinds: tuple[Fault, ...] = FAULTS,
    ) -> None:
        self._kinds = kinds
        self._world, self._observer, self._report, self._say = world, observer, report, say
        self._decisions = 0

    def blow(self, faults: int) -> Report:
        """Strikes so many times, then lets the calm come."""
        world, report = self._world, self._report
        world.operators.start()
        world.operators.wait_ready()
        chance = random.Random(f"{report.seed}/world")
        while report.faults < faults:
            self._live_on(chance)
            self._strike(self._draw())
            self._judge(self._observer.news())
            if report.faults % LULL_EVERY == 0 and report.faults < faults:
                self._lull()
        self._end()
        return report

    def _draw(self) -> tuple[Fault, random.Random]:
        """The next decision: of the seed and its number alone."""
        self._decisions += 1
        chance = random.Random(f"{self._report.seed}/{self._decisions}")
        return chance.choices(self._kinds, [fault.weight for fault in self._kinds])[0], chance

    def _live_on(self, chance: random.Random) -> None:
        self._world.operators.revive()
        try:
            train(self._world, chance)
            top_up(self._world, chance)
        except ApiStatusError as error:  # of an API server that has just come back
            self._say(f"not now: {error}")
        time.sleep(chance.uniform(0, LONGEST_PAUSE))

    def _strike(self, drawn: tuple[Fault, random.Random]) -> None:
        fault, chance = drawn
        if fault.disturbs:
            self._observer.disturbed_until = time.time() + 3600
        try:
            strike = fault.strike(self._world, chance)
            if strike:
                self._world.struck()
        except ApiStatusError as error:
            strike = ""
            self._say(f"{fault.kind}: {error}")
        if fault.disturbs:
            self._observer.disturbed_until = time.time() + RECOVERY_SECONDS
        if strike:
            self._report.struck[fault.kind] += 1
            self._report.strikes.append(f"{self._report.faults} {fault.kind}: {strike}")
            self._say(f"{time.strftime('%H:%M:%S')} {self._report.strikes[-1]}")

    def _lull(self) -> None:
        """All faults end for a while; every job must get somewhere."""
        calm.restore(self._world)
        self._observer.disturbed_until = time.time() + RECOVERY_SECONDS
        self._judge(calm.settled(self._world))

    def _end(self) -> None:
        world, observer = self._world, self._observer
        self._lull()
        since = time.time()
        self._judge(calm.drained(world))
        self._judge(calm.ends_without_event(world, since))
        events = [one for one in world.all_of(EVENTS) if one["involvedObject"]["kind"] == "GRPOJob"]
        for job in world.items(ALL_GRPOJOBS):  # as events may tell of them already
            until("the observer to hear of it", partial(observer.has_seen, job), 60)
        with observer.frozen() as history:
            self._judge(list(audit(history, world.ledger)))
            self._judge(list(events_tell_what_was(history, events)))
            self._report.jobs = len(history.jobs)
            self._report.certain = sum(
                len(surely_failed(job, world.ledger)) for job in history.jobs.values()
            )
            self._report.attempts = sum(job.last.attempt for job in history.jobs.values())
        self._judge(calm.deleted(world))
        world.operators.terminate()
        self._judge([*observer.news(), *world.operators.complaints()])

    def _judge(self, violations: list[str]) -> None:
        for one in violations:
            self._say(f"VIOLATION: {one}")
        self._report.violations += violations
