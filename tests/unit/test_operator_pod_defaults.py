"""What the operator was installed with reaches every kind of pod: whose it is, and what its image
is pulled with."""

from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_cli.cluster.delivery_pod import defaults_of_pod
from grpo_operator.pods.manifests import Attempt
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.process import settings
from tests.pods_of_jobs import pods_of_jobs
from tests.unit.operator_world import KEY, SERVED_GPU_PLAN, SPEC, UID

OWN = {"runAsUser": 7, "runAsNonRoot": True}
CACHED = {"model": {"name": "team/model", "parameters": "1B", "cache": {"claimName": "hub"}}}
TEMPLATE = {
    "initContainers": [{"name": "fetch", "securityContext": OWN}],
    "imagePullSecrets": [{"name": "team"}],
}
IDS = ("runAsUser", "runAsGroup", "fsGroup")


def pods(defaults: PodDefaults, **spec: Any) -> dict[str, Any]:
    """The pod of each Job that we make for a GRPOJob."""
    parsed = parse_spec({**SPEC, **CACHED, "podTemplate": {"spec": TEMPLATE}, **spec})
    return pods_of_jobs(
        Attempt(key=KEY, uid=UID, spec=parsed, plan=SERVED_GPU_PLAN, number=1), defaults
    )


@pytest.mark.parametrize("user", [1000, 1000680000, None])
def test_every_pod_has_the_user_or_none_for_the_platform_to_give(user: int | None) -> None:
    found = pods(PodDefaults(image="trainer:1", user=user))
    assert found.keys() == {"gang", "engines", "prefetch", "export"}
    for pod in found.values():
        security = pod["securityContext"]
        assert {name: security[name] for name in IDS if name in security} == (
            {} if user is None else dict.fromkeys(IDS, user)
        )
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (
            True,
            {"type": "RuntimeDefault"},
        )
        for container in pod["containers"]:
            assert not set(IDS) & container["securityContext"].keys()


def test_what_an_init_container_names_is_its_own() -> None:
    for pod in (
        pods(PodDefaults(image="trainer:1", user=None))[kind] for kind in ("gang", "engines")
    ):
        assert pod["initContainers"][0]["securityContext"]["runAsUser"] == 7


def test_a_user_without_an_entry_has_a_name_and_a_home_that_can_be_written() -> None:
    for pod in pods(PodDefaults(image="trainer:1", user=None)).values():
        values = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        assert (values["USER"], values["HOME"], values["HF_HOME"]) == (
            "grpo",
            "/tmp",
            "/tmp/huggingface",
        )


def test_pull_secrets_of_all_jobs_come_after_the_job_s_own_and_once() -> None:
    defaults = PodDefaults(image="trainer:1", pull_secrets=("all", "team"))
    for pod in pods(defaults).values():
        assert pod["imagePullSecrets"] == [{"name": "team"}, {"name": "all"}]
    for pod in pods(defaults, podTemplate={}).values():
        assert pod["imagePullSecrets"] == [{"name": "all"}, {"name": "team"}]
    assert "imagePullSecrets" not in pods(PodDefaults(image="trainer:1"), podTemplate={})["gang"]


def test_a_job_s_own_image_goes_before_the_default_one() -> None:
    for pod in pods(PodDefaults(image="trainer:1"), image="own:2").values():
        assert pod["containers"][0]["image"] == "own:2"


@pytest.mark.parametrize("user", [5, None])
def test_an_export_s_pod_is_made_as_the_last_attempt_s_was(user: int | None) -> None:
    defaults = PodDefaults(image="trainer:1", user=user, pull_secrets=("all",))
    assert defaults_of_pod(pods(defaults, podTemplate={})["gang"]) == defaults


def test_flags_say_what_all_pods_have() -> None:
    line = (
        "--trainer-image t:1 --pod-user none --pod-pull-secret a --pod-pull-secret b.c "
        "--pod-pull-secret a"
    )
    assert settings.parse(line.split()).pods == PodDefaults(
        image="t:1", user=None, pull_secrets=("a", "b.c")
    )
    assert settings.parse(["--pod-user", "1000680000"]).pods.user == 1000680000
    assert settings.parse([]).pods == PodDefaults()


@pytest.mark.parametrize("user", ["0", "-1", "", "root", "2147483648", "1.5", "None"])
def test_a_user_is_an_id_above_roots_or_none(user: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse([f"--pod-user={user}"])
    assert (
        f"{user!r} is neither none nor a user's id from 1 to 2147483647" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["", "A", "a/b", "-a", "a b", "a" * 254])
def test_a_pull_secret_has_a_name_of_kubernetes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings.parse([f"--pod-pull-secret={name}"])
    assert f"{name!r} is no name of a Secret" in capsys.readouterr().err
