"""The engines of an attempt: their Job, their pods, their names, and what they are not given."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.pods.platform import PlatformSpec
from grpo_api.text.contract import ENGINE_PORT, PLAN_ANNOTATION, PROGRESS_PORT
from grpo_operator.admission.spec_checks import plan_problem
from grpo_operator.pods.manifests import Attempt, engines_job, indexed_job, training_plan
from grpo_operator.pods.namespace_objects import engine_service
from grpo_operator.records.names import LABEL_COMPONENT, LABEL_UID
from grpo_operator.records.reasons import Reason
from grpo_planner.search.engines import NO_ENGINES_BESIDE
from tests.unit.operator_world import (
    GPU_PLAN,
    KEY,
    PLAN,
    PODS,
    SERVED_GPU_PLAN,
    SERVED_PLAN,
    SPEC,
    UID,
    make_job,
)


def attempt(plan: ExecutionPlan = SERVED_PLAN, **spec: Any) -> Attempt:
    return Attempt(key=KEY, uid=UID, spec=parse_spec({**SPEC, **spec}), plan=plan, number=3)


def engines(plan: ExecutionPlan = SERVED_PLAN, **spec: Any) -> Any:
    return engines_job(attempt(plan, **spec), PODS)


def pod(plan: ExecutionPlan = SERVED_PLAN, **spec: Any) -> Any:
    return engines(plan, **spec)["spec"]["template"]["spec"]


def container(plan: ExecutionPlan = SERVED_PLAN, **spec: Any) -> Any:
    return pod(plan, **spec)["containers"][0]


def test_engines_have_a_job_of_their_own_that_makes_each_again_by_its_index() -> None:
    body = engines()
    spec = body["spec"]
    assert body["metadata"]["name"] == "run-3-engine"
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimitPerIndex"] > 0
    assert not {"backoffLimit", "maxFailedIndexes", "suspend"} & spec.keys(), (
        "no broken index ends the others"
    )
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("plan", [PLAN, GPU_PLAN])
def test_a_plan_without_engines_in_pods_of_their_own_has_no_such_job(plan: ExecutionPlan) -> None:
    assert engines(plan) is None
    told = training_plan(attempt(plan))
    assert told.engines is None
    colocated = SERVED_PLAN.model_copy(
        update={
            "engine": SERVED_PLAN.engine
            and SERVED_PLAN.engine.model_copy(update={"kind": "Colocated"})
        }
    )
    assert engines(colocated) is None


def test_both_roles_carry_the_same_plan_with_the_engines_names() -> None:
    ours, theirs = (
        body["spec"]["template"]["metadata"]["annotations"][PLAN_ANNOTATION]
        for body in (indexed_job(attempt(), PODS), engines())
    )
    assert ours == theirs
    plan = TrainingPlan.model_validate_json(ours)
    assert plan.engines
    assert plan.engines.hosts == [f"run-3-engine-{i}.grpo-engines.team-a.svc" for i in (0, 1)]
    assert plan.generation.engine == "Auto"
    assert pod()["subdomain"] == engine_service("team-a")["metadata"]["name"] == "grpo-engines"


def test_the_service_of_engines_selects_all_of_them_and_none_who_trains() -> None:
    selector = engine_service("team-a")["spec"]["selector"].items()
    ours = indexed_job(attempt(), PODS)["spec"]["template"]["metadata"]["labels"]
    theirs = engines()["spec"]["template"]["metadata"]["labels"]
    assert selector <= theirs.items()
    assert not selector <= ours.items()
    assert (theirs[LABEL_UID], ours[LABEL_COMPONENT], theirs[LABEL_COMPONENT]) == (
        UID,
        "trainer",
        "engine",
    )


def test_the_roles_of_a_gang_keep_apart_only_where_ranks_must() -> None:
    ours = indexed_job(attempt(), PODS)["spec"]["template"]["spec"]
    (term,) = ours["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    wanted = term["labelSelector"]["matchLabels"].items()
    assert not wanted <= engines()["spec"]["template"]["metadata"]["labels"].items(), (
        "an engine may share its node"
    )
    assert "affinity" not in pod(), "and engines share one with each other"


def test_an_engine_has_its_own_command_port_gpus_and_requests() -> None:
    own = container(
        SERVED_GPU_PLAN, placement={"accelerator": "GPU"}, command=["python", "-m", "mine"]
    )
    assert own["command"] == ["python", "-m", "grpo_trainer.engine_pod"]
    assert own["ports"] == [
        {"name": "engine", "containerPort": ENGINE_PORT},
        {"name": "progress", "containerPort": PROGRESS_PORT},
    ]
    assert own["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": ENGINE_PORT}
    assert own["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert own["resources"]["requests"]["memory"] == str(2**30)
    assert pod(SERVED_GPU_PLAN)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}


def test_the_spec_may_say_what_engines_request() -> None:
    given = {"requests": {"cpu": "3", "memory": "5Gi"}, "limits": {"memory": "6Gi"}}
    theirs = container(
        generation={"engine": "Servers", "servers": {"resources": given}},
        resources={"limits": {"memory": "1Gi"}},
    )
    assert theirs["resources"] == given


def test_an_engine_gets_the_model_and_none_of_the_secrets_and_volumes_of_training() -> None:
    key = {"name": "secret", "key": "key"}
    spec: dict[str, Any] = {
        "model": {
            **SPEC["model"],
            "volume": {"claimName": "m"},
            "cache": {"claimName": "hub"},
            "tokenSecretRef": key,
        },
        "dataset": {"name": "x/y", "tokenSecretRef": key},
        "rewards": [{"http": {"url": "http://judge", "tokenSecretRef": key}}],
        "checkpoint": {"volume": {"claimName": "c"}},
        "export": {
            "to": "Hub",
            "hub": {"repository": "a/b", "tokenSecretRef": key},
            "signingKeySecretRef": key,
        },
    }
    names = {volume["name"] for volume in pod(**spec)["volumes"]}
    assert names == {"plan", "scratch", "shared-memory", "model", "hub-cache"}
    secrets = {
        one["name"]
        for one in container(**spec)["env"]
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    assert secrets == {"HF_TOKEN"}


def test_a_users_settings_reach_both_roles() -> None:
    spec: dict[str, Any] = {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
        "podTemplate": {"metadata": {"labels": {"team": "a"}}},
    }
    placement = {**SPEC["placement"], "priorityClassName": "high", "nodeSelector": {"pool": "x"}}
    theirs = engines(**spec, placement=placement)["spec"]["template"]
    assert theirs["metadata"]["labels"]["team"] == "a"
    assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in theirs["spec"]["containers"][0][
        "env"
    ]
    assert (theirs["spec"]["priorityClassName"], theirs["spec"]["nodeSelector"]) == (
        "high",
        {"pool": "x"},
    )


def test_where_engines_can_not_have_pods_of_their_own_a_plan_with_them_is_refused() -> None:
    job = make_job(name="x" * 46)
    assert plan_problem(job, PLAN) is None
    found = plan_problem(job, SERVED_PLAN)
    assert found
    assert found[0] is Reason.NOT_SUPPORTED
    assert "45 characters" in found[1]
    assert "spec.generation.engine" in found[1]


def test_a_plan_with_engines_from_before_its_class_is_refused_on_the_node_s_network() -> None:
    job = make_job()
    spec = job.valid_spec.on_platform(PlatformSpec(host_network=True))
    assert job.typed
    job = replace(job, typed=replace(job.typed, spec=spec))
    assert plan_problem(job, PLAN) is None
    text = f"{NO_ENGINES_BESIDE} Transformers"
    assert plan_problem(job, SERVED_PLAN) == (Reason.NOT_SUPPORTED, text)
