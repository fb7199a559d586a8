"""A cluster behind a kubectl that is no process: one GRPOJob, its pods, and an API server that may
refuse or be away."""

import io
import json
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.unit.operator_world import KEY, UID, at

Object = dict[str, Any]
REFUSED = (
    "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or "
    "port?"
)
FAULTS = {
    "refused": REFUSED,
    "slow": "Unable to connect to the server: net/http: TLS handshake timeout",
    "busy": "Error from server (TooManyRequests): the server has received too many requests",
    "broken": "Error from server (InternalError): an error on the server has prevented the request",
    "forbidden": 'Error from server (Forbidden): User "eve" cannot do that in namespace "team-a"',
    "stranger": "error: You must be logged in to the server (Unauthorized)",
    "context": 'error: context "nowhere" does not exist',
}
"""What kubectl prints where it fails."""
WRITES = ("patch", "delete", "create")


@dataclass
class Cluster:
    """What kubectl finds. `fault` fails requests from number `fault_from` on, counted from 0."""

    job: Object | None
    pods: list[Object] = field(default_factory=list)
    fault: str = ""
    fault_from: int = 0
    writes: list[tuple[str, ...]] = field(default_factory=list)
    requests: int = 0

    def answer(self, line: list[str]) -> tuple[int, str, str]:
        """The exit code of kubectl, and what it prints on stdout and on stderr."""
        words = [word for word in line[1:] if not word.startswith("--")]
        if words[0] == "config":
            return 0, "kind-kind\n", ""
        number, self.requests = self.requests, self.requests + 1
        if self.fault and number >= self.fault_from:
            return 1, "", FAULTS[self.fault] + "\n"
        verb, *rest = words
        kind = rest[0] if rest else ""
        if verb == "logs":
            return 0, "2026-11-21 step 1\n", ""
        if kind.startswith("grpojobs"):
            return self._of_job(line, verb, rest[1:])
        items = self.pods if kind == "pods" else []
        return 0, json.dumps({"items": items}), ""

    def _of_job(self, line: list[str], verb: str, names: list[str]) -> tuple[int, str, str]:
        if not names:
            return 0, json.dumps({"items": [self.job] if self.job else []}), ""
        if self.job is None or names != [self.job["metadata"]["name"]]:
            missing = f'grpojobs.grpo.dev "{" ".join(names)}" not found'
            return 1, "", f"Error from server (NotFound): {missing}\n"
        if verb in WRITES:
            self.writes.append((verb, *names))
        if verb == "patch":
            patch = next(word for word in line if word.startswith("--patch="))
            self.job["spec"] |= json.loads(patch.removeprefix("--patch="))["spec"]
        if verb == "delete":
            self.job["metadata"]["deletionTimestamp"] = at(0)
        return 0, json.dumps(self.job), ""

    @contextmanager
    def as_kubectl(self) -> Iterator[None]:
        """Let every process that is started be this kubectl."""

        def run(line: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
            return subprocess.CompletedProcess(line, *self.answer(line))

        with mock.patch("subprocess.run", run), mock.patch("subprocess.Popen", self._process):
            yield

    @contextmanager
    def _process(self, line: list[str], **_: Any) -> Iterator[Any]:
        code, out, _err = self.answer(line)
        output = io.BufferedReader(io.BytesIO(out.encode()))
        yield mock.Mock(stdout=output, returncode=code)


def grpojob(spec: Object, status: Object, **metadata: Any) -> Object:
    """A GRPOJob as the API server gives it."""
    known = {
        "namespace": KEY.namespace,
        "name": KEY.name,
        "uid": UID,
        "resourceVersion": "10",
        "generation": 1,
        "creationTimestamp": at(-3600),
    }
    return deepcopy(
        {
            "apiVersion": "grpo.dev/v1alpha1",
            "kind": "GRPOJob",
            "metadata": known | metadata,
            "spec": spec,
            "status": status,
        }
    )


def options(**more: Any) -> Namespace:
    """The options of a command, with the flags that say which cluster."""
    return Namespace(context=None, namespace=None, **more)
