"""The way to the next version of the API, walked on a real API server as docs/reference/api.md
describes it.

The same schema is served under two names while objects of the first exist. What could go wrong is
the server's doing: conversion, the rules over old objects, the list of stored versions.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from grpo_api.text.contract import GROUP, KIND, PLURAL, VERSION
from grpo_codegen.crd import definition
from harness.access import CommandError
from harness.definitions import definition_change
from harness.fixtures import AnyCluster
from harness.programs.processes import until
from tests.samples import REMOVE, changed, job

pytestmark = pytest.mark.slow

NEXT = "v1beta1"
CRD = f"{PLURAL}.{GROUP}"
STARTED, WAITING = "version-started", "version-waiting"
SETTINGS = changed({"managedBy": "example.com/dispatcher", "training.beta": 0.25})
STATUS = {"phase": "Running", "attempt": 2, "restarts": 1}


def install(cluster: AnyCluster, served: tuple[str, ...], stored: str) -> None:
    """Install a CRD with these versions and wait until the API server serves, stores and announces
    as it says."""
    apply(cluster, definition(served, stored))
    # how the API server writes the stored version into its discovery document
    digest = sha256(f"{GROUP}/{stored}/{KIND}".encode()).digest()
    announced = dict.fromkeys(served, b64encode(digest[:8]).decode())
    until(f"{served} to be served", lambda: discovered(cluster) == announced, 60)


def apply(cluster: AnyCluster, crd: dict[str, Any]) -> None:
    with definition_change(cluster):
        cluster.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", input=json.dumps(crd)
        )


def discovered(cluster: AnyCluster) -> dict[str, str]:
    """The versions of our group that the API server announces, each with the hash of the stored
    one."""
    groups = json.loads(cluster.kubectl("get", "--raw", "/apis"))["groups"]
    versions = [
        found["groupVersion"]
        for group in groups
        if group["name"] == GROUP
        for found in group["versions"]
    ]
    return {
        version.removeprefix(f"{GROUP}/"): resource["storageVersionHash"]
        for version in versions
        for resource in resources(cluster, version)
        if resource["name"] == PLURAL
    }


def resources(cluster: AnyCluster, version: str) -> list[dict[str, Any]]:
    """What a version serves; nothing where it has just gone."""
    try:
        found: list[dict[str, Any]] = json.loads(
            cluster.kubectl("get", "--raw", f"/apis/{version}")
        )["resources"]
    except CommandError as error:
        if "NotFound" not in error.stderr:
            raise
        return []
    return found


def stored_versions(cluster: AnyCluster) -> list[str]:
    """The versions in which etcd may still have objects."""
    found: list[str] = json.loads(cluster.kubectl("get", "crd", CRD, "-o", "json"))["status"][
        "storedVersions"
    ]
    return found


def read(cluster: AnyCluster, name: str, version: str) -> dict[str, Any]:
    """The object as that version shows it."""
    found: dict[str, Any] = json.loads(
        cluster.kubectl("get", f"{PLURAL}.{version}.{GROUP}", name, "-o", "json")
    )
    return found


def patch(
    cluster: AnyCluster, name: str, version: str, change: dict[str, Any], *flags: str
) -> None:
    resource = f"{PLURAL}.{version}.{GROUP}"
    cluster.kubectl("patch", resource, name, "--type=merge", "-p", json.dumps(change), *flags)


@pytest.fixture
def old_objects(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """Two GRPOJobs that were stored before anybody knew of the next version, one of them
    started."""
    for name in (STARTED, WAITING):
        crd_cluster.kubectl("create", "-f", "-", input=json.dumps(job(name, SETTINGS)))
    patch(crd_cluster, STARTED, VERSION, {"status": STATUS}, "--subresource=status")
    yield crd_cluster
    # back to what the other tests share: their objects, too, have been stored in the next version
    install(crd_cluster, (VERSION, NEXT), VERSION)
    rewrite(crd_cluster)
    crd_cluster.kubectl("delete", CRD, STARTED, WAITING)
    forget(crd_cluster, VERSION)
    install(crd_cluster, (VERSION,), VERSION)


def forget(cluster: AnyCluster, kept: str) -> None:
    """Say that etcd has objects of this version only."""
    change = json.dumps({"status": {"storedVersions": [kept]}})
    cluster.kubectl("patch", "crd", CRD, "--subresource=status", "--type=merge", "-p", change)


def rewrite(cluster: AnyCluster) -> None:
    """Write every object as it is: the API server stores it in the version that is stored now."""
    everything = cluster.kubectl(
        "get", f"{PLURAL}.{NEXT}.{GROUP}", "--all-namespaces", "-o", "json"
    )
    cluster.kubectl("replace", "-f", "-", input=everything)


def test_a_second_version_is_served_stored_and_outlives_the_first(old_objects: AnyCluster) -> None:
    before = {name: read(old_objects, name, VERSION) for name in (STARTED, WAITING)}

    install(old_objects, (VERSION, NEXT), VERSION)
    for name, old in before.items():
        assert read(old_objects, name, NEXT) == old | {"apiVersion": f"{GROUP}/{NEXT}"}
        assert read(old_objects, name, VERSION) == old

    patch(old_objects, WAITING, NEXT, {"spec": {"training": {"beta": 0.5}}})
    patch(old_objects, STARTED, NEXT, {"status": {"attempt": 3}}, "--subresource=status")
    assert read(old_objects, WAITING, VERSION)["spec"]["training"]["beta"] == 0.5
    for change, says in (
        ({"training": {"beta": 0.5}}, "once the job has started"),
        ({"managedBy": None}, "managedBy"),
    ):
        with pytest.raises(CommandError, match=says):
            patch(old_objects, STARTED, NEXT, {"spec": change})

    install(old_objects, (VERSION, NEXT), NEXT)
    assert stored_versions(old_objects) == [VERSION, NEXT]
    migrated = {name: read(old_objects, name, NEXT) for name in before}
    rewrite(old_objects)
    forget(old_objects, NEXT)
    for name, old in migrated.items():
        new = read(old_objects, name, NEXT)
        assert (new["spec"], new.get("status")) == (old["spec"], old.get("status"))
        assert new["metadata"]["generation"] == old["metadata"]["generation"], "nothing was changed"
        assert new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"], (
            "and yet it was written"
        )

    install(old_objects, (NEXT,), NEXT)
    assert read(old_objects, STARTED, NEXT)["status"]["attempt"] == 3
    assert stored_versions(old_objects) == [NEXT]


OTHER = {"metadata": {"name": "another"}}


def before_exports() -> dict[str, Any]:
    """The definition without the rules that only new objects have to keep."""
    crd = definition()
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    rules = spec["x-kubernetes-validations"]
    spec["x-kubernetes-validations"] = [rule for rule in rules if "optionalOldSelf" not in rule]
    assert len(spec["x-kubernetes-validations"]) < len(rules)
    return crd


def test_a_job_that_keeps_no_model_stays_valid_if_it_was_stored_before_that_was_refused(
    crd_cluster: AnyCluster,
) -> None:
    careless = job("careless", changed({"export": REMOVE}))
    apply(crd_cluster, before_exports())
    try:
        crd_cluster.kubectl("create", "-f", "-", input=json.dumps(careless))
        apply(crd_cluster, definition())
        with pytest.raises(CommandError, match="would be lost"):
            crd_cluster.kubectl(
                "create", "--dry-run=server", "-f", "-", input=json.dumps(careless | OTHER)
            )

        patch(crd_cluster, "careless", VERSION, {"status": STATUS}, "--subresource=status")
        patch(crd_cluster, "careless", VERSION, {"spec": {"suspend": True}})
        crd_cluster.kubectl("apply", "-f", "-", input=json.dumps(careless))
        assert "export" not in read(crd_cluster, "careless", VERSION)["spec"]
    finally:
        apply(crd_cluster, definition())
        crd_cluster.kubectl("delete", CRD, "careless", "--ignore-not-found")
