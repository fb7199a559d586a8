"""Definitions of GRPOJob on a running API server: changed so that everything that comes after meets
the new one."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .access import Access, CommandError
from .programs.processes import ClusterError, until

NAME = "grpojobs.grpo.dev"
SECONDS = 60.0
# the first event then comes at once, even if there is no object
WATCH = (
    "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
)


@contextmanager
def definition_change(cluster: Access) -> Iterator[None]:
    """Leave the block once GRPOJobs are read, written and watched by the definition that the block
    has stored.

    For a second or more after a change the API server sends events to open watches by the old
    definition, although it takes new objects by the new one already (`tearDown` of
    apiextensions-apiserver's crdHandler). Then it ends these watches. So a watch that was opened
    before the block is waited for.

    Raises:
        ClusterError: the new definition is not served within SECONDS.
    """
    before = _definition(cluster)
    if before is None:
        yield
    else:
        with _watching(cluster, before) as watch:
            yield
            if _revision(_definition(cluster)) != _revision(before):
                _wait_end(watch)
    # a new definition is Established a moment before its objects can be listed, and may be
    # discovered a moment after that
    until("GRPOJobs to be served", partial(_listed, cluster), SECONDS)


def _definition(cluster: Access) -> dict[str, Any] | None:
    found = cluster.kubectl("get", "crd", NAME, "--ignore-not-found", "-o", "json")
    return json.loads(found) if found else None


def _revision(definition: dict[str, Any] | None) -> tuple[str, int] | None:
    return (
        (definition["metadata"]["uid"], definition["metadata"]["generation"])
        if definition
        else None
    )


def _path(definition: dict[str, Any]) -> str:
    """Return the path of all GRPOJobs in the first version that the definition serves."""
    spec = definition["spec"]
    return f"/apis/{spec['group']}/{_version(spec)}/{spec['names']['plural']}"


def _version(spec: dict[str, Any]) -> str:
    """Return the first version that is served."""
    version: str = next(version["name"] for version in spec["versions"] if version["served"])
    return version


@contextmanager
def _watching(cluster: Access, definition: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """Watch GRPOJobs while the block runs; the watch is open when the block begins."""
    command = cluster.kubectl_command("get", "--raw", f"{_path(definition)}?{WATCH}")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=cluster.environment
    ) as watch:
        try:
            assert watch.stdout
            watch.stdout.readline()
            yield watch
        finally:
            watch.terminate()


def _wait_end(watch: "subprocess.Popen[str]") -> None:
    try:
        watch.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"the API server still serves the old definition of {NAME} after {SECONDS:.0f} s"
        ) from error


def _listed(cluster: Access) -> bool:
    definition = _definition(cluster)
    if definition is None:
        return False
    try:
        cluster.kubectl("get", "--raw", f"{_path(definition)}?limit=1")
    except CommandError:  # NotFound, or 429 while its storage starts
        return False
    spec = definition["spec"]
    # With the version: kubectl remembers for hours which one it is to take without.
    return is_discovered(cluster, f"{spec['names']['plural']}.{_version(spec)}.{spec['group']}")


def is_discovered(cluster: Access, kind: str) -> bool:
    """Whether kubectl finds the kind: `<plural>.<group>` or `<plural>.<version>.<group>`."""
    try:
        cluster.kubectl("get", kind, "--namespace", "default", "--output", "name")
    except CommandError:
        return False
    return True
