"""spec.model.cache in the pod: a claim that it may write, and the variables that lead the hub's
clients there."""

from typing import Any

from tests.unit.test_operator_manifests import container, mounts, pod

CACHE: dict[str, Any] = {
    "name": "team/model",
    "parameters": "77K",
    "cache": {"claimName": "hub", "subPath": "team-a"},
}


def variables(**spec: Any) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container(**spec)["env"]}


def test_the_claim_is_mounted_for_writing_and_used_by_the_clients() -> None:
    volume = {"name": "hub-cache", "persistentVolumeClaim": {"claimName": "hub"}}
    assert volume in pod(model=CACHE)["volumes"]
    assert mounts(model=CACHE)["/hub-cache"] == ("hub-cache", False)
    (mount,) = [one for one in container(model=CACHE)["volumeMounts"] if one["name"] == "hub-cache"]
    assert mount["subPath"] == "team-a"
    found = variables(model=CACHE)
    assert (found["HF_HUB_CACHE"], found["HF_DATASETS_CACHE"]) == (
        "/hub-cache/hub",
        "/hub-cache/datasets",
    )
    assert found["HF_HOME"].startswith("/tmp/"), (
        "what a repository ships is run from the pod's own copy"
    )
    assert (
        pod(model=CACHE)["securityContext"]["fsGroup"]
        == pod(model=CACHE)["securityContext"]["runAsUser"]
    )


def test_without_it_the_pod_fetches_for_itself() -> None:
    assert "/hub-cache" not in mounts()
    assert not {"HF_HUB_CACHE", "HF_DATASETS_CACHE"} & variables().keys()
    assert variables()["HF_HUB_DOWNLOAD_TIMEOUT"] == "30"
    assert variables()["HF_HUB_DISABLE_TELEMETRY"] == "1", "TRL would tell the hub of every start"


def test_the_users_own_variable_wins() -> None:
    assert (
        variables(model=CACHE, env=[{"name": "HF_HUB_CACHE", "value": "/mine"}])["HF_HUB_CACHE"]
        == "/mine"
    )


def test_the_clients_keep_no_second_copy_of_what_they_fetch() -> None:
    assert variables()["HF_XET_CHUNK_CACHE_SIZE_BYTES"] == "0"
