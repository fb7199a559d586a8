"""Watches the API server directly, not through the operator or its proxy, and judges every change
at once."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from harness.cluster import Cluster
from harness.programs.patience import idle_seconds
from harness.programs.processes import until

from .history import History, Job
from .invariants import judge

PATHS = {
    "grpojobs": "/apis/grpo.dev/v1alpha1/grpojobs",
    "pods": "/api/v1/pods",
    "nodes": "/api/v1/nodes",
}
WATCH_SECONDS = 600
OVERLAP_SECONDS = 8.0
"""Longest idle time of the machine in which live pods of two attempts are there at once while
nothing disturbs the operator: the Job controller ends the peers of a failed pod a second or two
later."""


class Observer:
    """One thread per kind, and one that looks at what time alone makes wrong."""

    def __init__(self, cluster: Cluster) -> None:
        """Nothing is watched yet."""
        self._cluster = cluster
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._listed = {plural: threading.Event() for plural in PATHS}
        self.history = History()
        self._violations: list[str] = []
        self.disturbed_until = 0.0
        """Unix time until which nobody can expect the operator to keep up."""
        self._overlaps: dict[tuple[str, str], float] = {}
        self._newest = dict.fromkeys(PATHS, 0)
        """The newest resourceVersion of each kind that is in the history."""

    @contextlib.contextmanager
    def watching(self) -> Iterator["Observer"]:
        """Watches while the block runs."""
        threads = [
            threading.Thread(target=self._follow, args=(plural,), daemon=True) for plural in PATHS
        ]
        threads.append(threading.Thread(target=self._look_on, daemon=True))
        for thread in threads:
            thread.start()
        until(
            "the observer's first LISTs",
            lambda: all(one.is_set() for one in self._listed.values()),
            60,
        )
        try:
            yield self
        finally:
            self._stop.set()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[History]:
        """The history, while it stands still."""
        with self._lock:
            yield self.history

    def has_seen(self, grpojob: dict[str, Any]) -> bool:
        """Whether the history has a GRPOJob as it is here: a watch may tell of it later."""
        return self._newest["grpojobs"] >= int(grpojob["metadata"]["resourceVersion"])

    def news(self) -> list[str]:
        """The violations since the last call."""
        with self._lock:
            found, self._violations = self._violations, []
        return found

    def _follow(self, plural: str) -> None:
        version, first = "", True
        while not self._stop.is_set():
            try:
                if not version:
                    version = self._list(plural, gap=not first)
                    first = False
                version = self._watch(plural, version)
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.2)

    def _request(self, path: str) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        connection = self._cluster.control_plane.client().connection(WATCH_SECONDS)
        connection.request("GET", path)
        return connection, connection.getresponse()

    def _list(self, plural: str, *, gap: bool) -> str:
        connection, answer = self._request(PATHS[plural])
        with contextlib.closing(connection):
            page: dict[str, Any] = json.loads(answer.read())
        if answer.status != http.client.OK:
            raise ConnectionError(str(page)[:200])
        now = time.time()
        with self._lock:
            news = [self._see(plural, found, now, gone=False, gap=gap) for found in page["items"]]
            self.history.listed(plural, {found["metadata"]["uid"] for found in page["items"]}, now)
            # a list is in the order of names: while it is taken in, one job is newer than the other
            for job in filter(None, news):
                self._violations += judge(self.history, job)
            self._newest[plural] = int(page["metadata"]["resourceVersion"])
        self._listed[plural].set()
        return str(page["metadata"]["resourceVersion"])

    def _watch(self, plural: str, version: str) -> str:
        """Follows events until the connection ends; returns where to go on, nothing after an error
        event."""
        path = f"{PATHS[plural]}?watch=true&allowWatchBookmarks=true&resourceVersion={version}"
        connection, answer = self._request(f"{path}&timeoutSeconds={WATCH_SECONDS}")
        with contextlib.closing(connection):
            if answer.status == http.client.GONE:
                return ""
            if answer.status != http.client.OK:
                raise ConnectionError(str(answer.status))
            try:
                for line in answer:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return ""
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        with self._lock:
                            self._saw(plural, event)
                            self._newest[plural] = int(version)
                    if self._stop.is_set():
                        break
            except (OSError, http.client.HTTPException, ValueError):
                return version
        return version

    def _saw(self, plural: str, event: dict[str, Any]) -> None:
        gone = event["type"] == "DELETED"
        if job := self._see(plural, event["object"], time.time(), gone=gone, gap=False):
            self._violations += judge(self.history, job)

    def _see(
        self, plural: str, item: dict[str, Any], at: float, *, gone: bool, gap: bool
    ) -> Job | None:
        """Takes an object in; returns the job that has a new version by it."""
        known = self.history.jobs.get(item["metadata"]["uid"])
        before = len(known.versions) if known else 0
        self.history.see(plural, item, at, gone=gone, gap=gap)
        if plural != "grpojobs":
            return None
        job = self.history.jobs[item["metadata"]["uid"]]
        return job if len(job.versions) > before else None

    def _look_on(self) -> None:
        looked_at, idle_then = time.time(), idle_seconds()
        while not self._stop.wait(0.5):
            idle_now = idle_seconds()
            is_undisturbed = looked_at > self.disturbed_until
            with self._lock:
                self._overlapping(idle_now - idle_then if is_undisturbed else 0.0)
            looked_at, idle_then = time.time(), idle_now

    def _overlapping(self, passed: float) -> None:
        """Two attempts of a job may be alive together for a moment; counts only what passes
        undisturbed."""
        seen = set()
        for uid in {pod.job for pod in self.history.pods.values()} & self.history.jobs.keys():
            job = self.history.jobs[uid]
            for attempt in earlier_lives(self.history, job):
                key = (job.uid, attempt)
                seen.add(key)
                self._overlaps[key] = self._overlaps.get(key, 0.0) + passed
                if self._overlaps[key] > OVERLAP_SECONDS:
                    self._overlaps[key] = -1e9
                    self._violations.append(
                        f"no two attempts live: {job.name} ({job.uid[:8]}): pods of attempt "
                        f"{attempt} have been alive "
                        f"beside those of attempt {job.last.attempt} for {OVERLAP_SECONDS:.0f} "
                        "undisturbed seconds"
                    )
        self._overlaps = {key: value for key, value in self._overlaps.items() if key in seen}


def earlier_lives(history: History, job: Job) -> set[str]:
    """Earlier attempts with live pods, while the current one has live pods, too."""
    attempts = {
        pod.attempt for pod in history.pods.values() if pod.job == job.uid and pod.live and pod.node
    }
    current = str(job.last.attempt)
    if current not in attempts:
        return set()
    return {one for one in attempts if one.isdigit() and int(one) < job.last.attempt}
