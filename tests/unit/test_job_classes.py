"""A job with its GRPOJobClass: what it gets, what refuses it, and what becomes of changes of the
class."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_api.effective_spec import applied_class, gpus_problem, resolve
from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_api.job_class import GRPOJobClass
from grpo_api.pods.platform import PlatformSpec
from grpo_api.report.report import Outcome, Result
from grpo_api.status.status import AppliedJobClass
from grpo_api.text.base import dotted_path
from grpo_operator.admission.capacity import Capacity
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.next_action import decide
from grpo_operator.pods.manifests import Attempt
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.job_class import (
    JobClasses,
    JobClassFacts,
    job_class_facts,
    named_classes,
    with_class,
)
from grpo_operator.records.parsing import grpojob_record
from tests.class_samples import BAD_CLASSES, CLASS, GOOD_CLASSES, ROOT, job_class
from tests.generated import cases
from tests.pods_of_jobs import pods_of_jobs
from tests.samples import GOOD, SPEC, Bad, changed
from tests.unit.operator_world import (
    KEY,
    LIMITS,
    NOW,
    SERVED_GPU_PLAN,
    UID,
    active_status,
    condition,
    job_object,
    make_child,
    make_job,
    make_pod,
    make_seen,
)
from tests.unit.queue_world import ASKED as ASK
from tests.unit.queue_world import cluster, gang, job, judged, queue

MOST_CHARACTERS = 300
"""Of a message to users, for each problem."""
LABELS = {"cost-center": "17"}
GPU = {"accelerator": "GPU", "nodes": None}
NAMED = {"jobClassName": "h100"}
MOUNT = {"podTemplate.spec.volumes": [{"name": "mine", "emptyDir": {}}]}
CREATED_NODES = {
    **{"provisioning": "CreatePods", "gpuProduct": "H100", "gpusPerNode": 8, "nodes": 4},
    "nodeSelector": {"pool": "h100"},
}


def applied(spec: dict[str, Any], generation: int = 3) -> AppliedJobClass:
    """The class h100 with this spec."""
    return applied_class("h100", generation, spec)


def resolved(job_changes: dict[str, Any], spec: dict[str, Any] = CLASS) -> GRPOJobSpec:
    """The effective spec of a job that its class takes."""
    found = resolve(parse_spec(changed(job_changes)), applied(spec), LABELS)
    assert found.spec is not None
    assert found.problems == ()
    return found.spec


def refusals(job_changes: dict[str, Any], spec: dict[str, Any] = CLASS) -> str:
    """Why a class refuses a job."""
    found = resolve(parse_spec(changed(job_changes)), applied(spec), LABELS)
    assert all(len(problem) <= MOST_CHARACTERS for problem in found.problems)
    assert all(problem.startswith("GRPOJobClass h100: ") for problem in found.problems)
    return "; ".join(found.problems)


@pytest.mark.parametrize("bad", BAD_CLASSES, ids=lambda bad: bad.name)
def test_a_class_that_the_server_refuses_is_refused_by_the_models(bad: Bad) -> None:
    with pytest.raises(ValidationError) as caught:
        GRPOJobClass.model_validate({"spec": bad.spec}, strict=True, by_name=False)
    paths = [dotted_path(problem["loc"]) for problem in caught.value.errors()]
    assert any(path.startswith(bad.path) for path in paths), paths


@pytest.mark.parametrize("name", GOOD)
def test_an_empty_class_changes_no_job(name: str) -> None:
    spec = parse_spec(changed(GOOD[name]))
    assert resolve(spec, applied({}), {}) == (spec, ())


def test_a_job_gets_what_its_class_gives() -> None:
    spec = resolved({})
    assert spec.image == "registry.example/grpo-trainer:1"
    assert [variable.name for variable in spec.env] == ["HTTPS_PROXY"]
    assert spec.pod_template.spec.image_pull_secrets[0].name == "registry"
    assert spec.placement.node_selector == {"pool": "h100"}
    assert spec.placement.gpus
    assert spec.placement.gpus.max == 16
    assert spec.active_deadline_seconds == 86400
    assert spec.resources.network_cards == ["rdma/hca"]
    assert spec.generation.engine == "Colocated"
    assert spec.platform.gpu_hour_prices == {"NVIDIA-H100-80GB-HBM3": 2.49}
    assert spec.checkpoint.volume_claim_template is None


def test_a_job_overrides_defaults_and_adds_to_what_is_fixed() -> None:
    template = {"size": "10Gi", "storageClassName": "nfs"}
    spec = resolved(
        {
            "image": "mine:1",
            "generation.engine": "Transformers",
            "env": [{"name": "SEED", "value": "7"}],
            "placement.nodeSelector": {"zone": "a"},
            "placement.tolerations": [{"key": "mine", "operator": "Exists"}],
            "podTemplate.spec.imagePullSecrets": [{"name": "team"}],
            "checkpoint.volumeClaimTemplate": template,
        }
    )
    assert (spec.image, spec.generation.engine) == ("mine:1", "Transformers")
    assert spec.generation.engine_arguments is None
    assert {variable.name for variable in spec.env} == {"HTTPS_PROXY", "SEED"}
    assert spec.placement.node_selector == {"pool": "h100", "zone": "a"}
    assert {toleration.key for toleration in spec.placement.tolerations} == {"dedicated", "mine"}
    assert len(spec.pod_template.spec.image_pull_secrets) == 2
    assert spec.checkpoint.volume_claim_template
    assert spec.checkpoint.volume_claim_template.storage_class_name == "nfs"


@pytest.mark.parametrize(
    ("job_changes", "says"),
    [
        (
            {"env": [{"name": "HTTPS_PROXY", "value": "http://other:1"}]},
            r"spec\.env\[HTTPS_PROXY\] is fixed by the class: remove it",
        ),
        ({"placement.nodeSelector": {"pool": "l4"}}, r"nodeSelector\.pool is 'l4', .* 'h100'"),
        ({"podTemplate.spec.runtimeClassName": "kata"}, r"runtimeClassName is 'kata'"),
        ({"resources.limits": {"rdma/hca": 2}}, r"spec\.resources\.limits\.rdma/hca is '2'"),
        ({"placement.gpus": {"max": 32}}, r"gpus\.max asks for 32 GPUs; at most 16 are allowed"),
        ({"placement.gpus": {"min": 17}}, r"gpus\.min asks for 17 GPUs; at most 16 are allowed"),
        ({"placement.nodes": 17}, r"placement\.nodes asks for 17 GPUs; at most 16 are allowed"),
        ({"placement": CREATED_NODES}, r"gpusPerNode asks for 32 GPUs"),
        ({"activeDeadlineSeconds": 86401}, r"activeDeadlineSeconds is 86401; at most 86400 is"),
        ({"placement.priorityClassName": "high"}, r"is high; allowed: low, normal"),
        ({"generation": {"engine": "Servers", "servers": {"replicas": 2}}}, ""),
        ({"generation.servers": {"replicas": 2}}, r"with it spec\.generation: servers belongs to"),
        (
            {"podTemplate.spec.volumes": [{"name": "class-ca", "emptyDir": {}}]},
            r"spec\.podTemplate\.spec\.volumes\[class-ca\]: rename it",
        ),
        (
            MOUNT | {"volumeMounts": [{"name": "mine", "mountPath": "/etc/proxy-ca"}]},
            r"spec\.volumeMounts\[/etc/proxy-ca\]: the class mounts its own there",
        ),
    ],
)
def test_a_job_beyond_its_class_is_refused_with_a_sentence(
    job_changes: dict[str, Any], says: str
) -> None:
    assert re.search(says, refusals(job_changes))
    assert bool(says) == bool(refusals(job_changes))


def test_a_missing_label_is_named() -> None:
    found = resolve(parse_spec(SPEC), applied(CLASS), {"cost-center": ""})
    assert found.problems == (
        "GRPOJobClass h100: metadata.labels: cost-center is missing; set it on the GRPOJob",
    )


def test_engines_count_against_the_limit_of_gpus() -> None:
    assert gpus_problem(applied({"limits": {"gpus": 12}}), SERVED_GPU_PLAN) == ""
    refused = gpus_problem(applied({"limits": {"gpus": 8}}), SERVED_GPU_PLAN)
    assert "takes 12 GPUs, its engines' included; at most 8" in refused


def test_engines_of_a_class_are_not_for_jobs_on_cpus() -> None:
    spec = resolved({"placement": {"accelerator": "CPU"}})
    assert (spec.generation.engine, spec.placement.gpus) == ("Auto", None)


def test_a_class_of_a_newer_version_is_a_problem_of_its_own() -> None:
    found = resolve(parse_spec(SPEC), applied({"future": {"field": 1}}), {})
    assert found.spec is None
    says = (
        "GRPOJobClass h100 can't be read by this version: spec.future: unknown field; `kubectl "
        "explain grpojobclass.spec` lists what there is"
    )
    assert found.problems == (says,)


VALUES = st.sampled_from(["a", "b", "c"])
MAPS = st.dictionaries(VALUES, VALUES, max_size=3)
SETTINGS = st.fixed_dictionaries(
    {
        "placement": st.fixed_dictionaries({"nodeSelector": MAPS}),
        "env": MAPS.map(lambda env: [{"name": k, "value": v} for k, v in env.items()]),
    },
    optional={"image": VALUES},
)


def by_name(env: list[dict[str, str]]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in env}


@settings(max_examples=cases(300, gate=30))
@given(default=SETTINGS, own=SETTINGS, fixed=SETTINGS)
def test_fixed_goes_before_the_job_and_the_job_before_the_default(
    default: dict[str, Any], own: dict[str, Any], fixed: dict[str, Any]
) -> None:
    found = resolve(parse_spec({**SPEC, **own}), applied({"default": default, "fixed": fixed}), {})
    assert found.spec is not None
    env = {variable.name: variable.value for variable in found.spec.env}
    parts = [by_name(part["env"]) for part in (default, own, fixed)]
    assert env == parts[0] | parts[1] | parts[2]
    selectors = [part["placement"]["nodeSelector"] for part in (default, own, fixed)]
    assert found.spec.placement.node_selector == selectors[0] | selectors[1] | selectors[2]
    images = [part.get("image") for part in (fixed, own, default)]
    assert found.spec.image == next(filter(None, images), None)
    differs = [
        key for a, b in ((parts[1], parts[2]), (selectors[1], selectors[2]))
        for key in a.keys() & b.keys() if a[key] != b[key]
    ]  # fmt: skip
    differs += ["image"] if None not in images[:2] and images[0] != images[1] else []
    assert len(found.problems) == len(differs)


@settings(max_examples=cases(200, gate=20))
@given(st.sampled_from(sorted(GOOD_CLASSES)), st.sampled_from(sorted(GOOD)))
def test_a_resolved_spec_is_a_valid_spec_and_stays_what_is_trained(kind: str, name: str) -> None:
    declared = parse_spec(changed(GOOD[name]))
    found = resolve(declared, applied(GOOD_CLASSES[kind]), LABELS)
    if found.spec is None:
        return
    again = parse_spec(found.spec.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert again.on_platform(found.spec.platform, found.spec.most_gpus) == found.spec
    for section in ("model", "dataset", "rewards", "training", "reference", "adapter", "export"):
        assert getattr(found.spec, section) == getattr(declared, section)
    for sampled in ("stop", "kwargs"):
        assert getattr(found.spec.generation, sampled) == getattr(declared.generation, sampled)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("all", "restricted"),
        ("empty", "restricted"),
        ("groups", "restricted"),
        ("root", "privileged"),
        ("host-network", "privileged"),
        ("plugin", "privileged"),
        ("unconfined", "privileged"),
    ],
)
def test_a_platform_says_which_pod_security_standard_it_needs(name: str, level: str) -> None:
    platform = GRPOJobClass.model_validate({"spec": GOOD_CLASSES[name]}).spec.platform
    assert str(platform.pod_security_level) == level
    assert str(platform.of_cpu_pods.pod_security_level) in ("restricted", "baseline", level)


def test_root_alone_needs_baseline() -> None:
    root = PlatformSpec.model_validate({"securityContext": {"runAsUser": 0}})
    assert str(root.pod_security_level) == "baseline"


def pods(spec: dict[str, Any], job_changes: Mapping[str, Any]) -> dict[str, Any]:
    """The pod of each Job that is made for a job of a class."""
    effective = resolved({"model.cache": {"claimName": "hub"}, **job_changes}, spec)
    attempt = Attempt(key=KEY, uid=UID, spec=effective, plan=SERVED_GPU_PLAN, number=1)
    return pods_of_jobs(attempt, PodDefaults(image="trainer:1"))


def test_every_pod_of_a_gang_has_the_devices_the_proxy_and_the_pull_secret() -> None:
    for kind, pod in pods(CLASS, {}).items():
        container = pod["containers"][0]
        limits = container["resources"].get("limits", {})
        assert limits.get("rdma/hca") == ("1" if kind in ("gang", "engines") else None)
        assert {"name": "registry"} in pod["imagePullSecrets"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env["HTTPS_PROXY"] == "http://proxy.example:3128"
        assert {"name": "class-ca", "configMap": {"name": "ca"}} in pod["volumes"]
        assert pod["securityContext"]["runAsUser"] == 1000


def test_what_goes_beyond_restricted_reaches_the_gang_alone() -> None:
    plugin = {"hostNetwork": True, **GOOD_CLASSES["plugin"]["platform"], **ROOT["platform"]}
    # On the node's network Kubernetes takes the policy ClusterFirst for the node's own.
    dns = {"podTemplate.spec.dnsPolicy": "ClusterFirst"}
    made = [pods({"platform": plugin}, changes) for changes in ({}, dns)]
    for kind, pod in [*made[0].items(), *made[1].items()]:
        in_gang = kind in ("gang", "engines")
        container = pod["containers"][0]
        assert pod.get("hostNetwork", False) == in_gang
        assert (pod.get("dnsPolicy") == "ClusterFirstWithHostNet") == in_gang
        added = container["securityContext"]["capabilities"].get("add")
        assert added == (["IPC_LOCK"] if in_gang else None)
        host_paths = [volume for volume in pod["volumes"] if "hostPath" in volume]
        assert len(host_paths) == int(in_gang)
        assert pod["securityContext"]["runAsNonRoot"] is False
        assert pod["securityContext"]["runAsUser"] == 0


def facts(name: str, created: int, *, default: bool) -> JobClassFacts:
    item = job_class(name, {}, default=default)
    item["metadata"] |= {"creationTimestamp": f"2026-11-0{created}T00:00:00Z", "generation": 1}
    return job_class_facts(item)


def test_the_newest_default_is_the_default() -> None:
    found = named_classes(
        [
            facts("old", 1, default=True),
            facts("b", 2, default=True),
            facts("a", 2, default=True),
            facts("newest", 3, default=False),
        ]
    )
    assert found[""].name == "a"
    assert "" not in named_classes([facts("newest", 3, default=False)])


def classes(spec: dict[str, Any] = CLASS, level: str = "privileged") -> JobClasses:
    """The class h100, and what the job's namespace enforces."""
    return JobClasses(
        by_name={"h100": applied(spec)}, enforced_levels={KEY.namespace: level, "other": ""}
    )


def test_a_missing_class_is_named_and_an_unseen_one_says_why() -> None:
    record = make_job({**NAMED, "jobClassName": "gone"})
    assert with_class(record, classes()).class_problem == (
        "JobClassNotFound",
        "spec.jobClassName: there is no GRPOJobClass gone; the job waits until gone is there",
    )
    unseen = JobClasses(problem="classes can't be seen: forbidden")
    found = with_class(record, unseen).class_problem
    assert found
    assert "can't be seen: forbidden" in found[1]
    assert with_class(make_job(), unseen).class_problem is None


@pytest.mark.parametrize(
    ("level", "allowed"),
    [("privileged", True), ("baseline", False), ("restricted", False), ("", False)],
)
def test_privileges_need_the_namespace_s_label(level: str, allowed: bool) -> None:
    record = make_job(NAMED)
    found = with_class(record, classes(ROOT, level)).class_problem
    assert (found is None) == allowed
    if found:
        assert found[0] == "PodSecurityForbids"
        assert "pod-security.kubernetes.io/enforce of namespace team-a" in found[1]
        assert len(found[1]) <= MOST_CHARACTERS
    new_namespace = JobClasses(by_name={"h100": applied(ROOT)}, enforced_levels={"other": level})
    assert with_class(record, new_namespace).class_problem, "its label has not been seen yet"
    unseen = JobClasses(by_name={"h100": applied(ROOT)})
    assert with_class(record, unseen).class_problem is None, "the API server judges"


@pytest.mark.parametrize("label", ["kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"])
def test_kueue_s_labels_may_be_required(label: str) -> None:
    required = classes({"limits": {"requiredLabels": [label]}})
    assert with_class(make_job(NAMED), required).class_problem is not None
    queued = make_job(NAMED, labels={label: "team"})
    assert with_class(queued, required).class_problem is None


def test_a_queue_of_the_spec_stands_for_its_label() -> None:
    required = applied({"limits": {"requiredLabels": ["kueue.x-k8s.io/queue-name"]}})
    queued = parse_spec(changed({"placement.queueName": "team"}))
    assert resolve(queued, required, {}).problems == ()


def test_a_running_attempt_keeps_its_class_and_the_next_takes_the_new_one() -> None:
    before, after = {"default": {"image": "old:1"}}, {"default": {"image": "new:2"}}
    status = active_status(jobClass=to_json_class(applied(before, 1)))
    running = make_job(NAMED, status)
    assert running.spec
    assert running.spec.image == "old:1"
    changed_class = JobClasses(by_name={"h100": applied(after, 2)})
    again = with_class(running, changed_class)
    assert again.spec
    assert again.spec.image == "new:2"
    assert again.content.job_class
    assert again.content.job_class.generation == 2
    status["conditions"] = [condition("Admitted", "False", "Restarting")]
    ended = make_job(NAMED, status)
    assert ended.spec
    assert ended.spec.image is None, "no attempt has a class now"


def test_an_edit_that_no_class_goes_with_takes_no_limit_of_time_from_a_running_attempt() -> None:
    """Between `suspend: true` and `false`, env may change, and a list with the class's be too
    long; the operator may see the last change alone."""
    limited = {**CLASS, "limits": {"activeDeadlineSeconds": 600}}
    status = active_status(jobClass=to_json_class(applied(limited)))
    env = [{"name": f"V{number}", "value": "x"} for number in range(64)]
    record = make_job({**NAMED, "env": env}, status)
    assert record.spec is None
    things = make_child(), make_pod(0), make_pod(1)
    in_time = decide(make_seen(record, *things), LIMITS)
    assert (in_time.action, in_time.requeue_after) == (Action.WAIT, 540.0)
    late = decide(make_seen(record, *things, now=NOW + 600), LIMITS)
    assert (late.action, late.reason) == (Action.FAIL, "DeadlineExceeded")


def to_json_class(one: AppliedJobClass) -> dict[str, Any]:
    return one.model_dump(mode="json", by_alias=True)


def test_the_queue_s_label_reaches_a_resolved_job() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    record = with_class(make_job(NAMED, labels=labels), classes({"limits": {"gpus": 8}}))
    assert record.spec
    assert record.spec.placement.queue_name == "team"


def gpu_job(name: str, **spec: Any) -> Any:
    record = job(name, gang(1, 4))
    fields = job_object({"placement": GPU, **spec}, record.raw_status)
    fields["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    return grpojob_record(fields)


def test_the_queue_judges_each_job_with_its_class() -> None:
    jobs = [
        gpu_job("fits", **NAMED),
        gpu_job("missing", jobClassName="gone"),
        gpu_job("refused", **NAMED, env=[{"name": "P", "value": "2"}]),
    ]
    fixed = {"fixed": {"env": [{"name": "P", "value": "1"}]}}
    found = judged(jobs, cluster(8, job_classes=classes(fixed)))
    assert found["uid-fits"].admitted
    assert found["uid-fits"].job_class == applied(fixed)
    missing, refused = found["uid-missing"], found["uid-refused"]
    assert (missing.blocked, missing.reason) == (True, "JobClassNotFound")
    assert (refused.refused, refused.reason) == (True, "RefusedByJobClass")


async def test_a_commit_records_the_class_and_a_restart_takes_the_new_one() -> None:
    there = cluster(8, job_classes=classes({}))
    waiting = gpu_job("run", **NAMED)
    admission = queue([waiting], there)
    await admission.run_cycle()
    asked = with_class(waiting, there.job_classes)
    decision = await admission.answer(make_seen(asked), ASK)
    assert decision
    assert decision.action is Action.COMMIT
    assert decision.job_class == applied({})
    old = to_json_class(applied({"default": {"image": "old:1"}}, 1))
    active = gpu_job_active(old)
    restart = await queue([active], there).answer(make_seen(active), ASK)
    assert restart
    assert restart.action is Action.COMMIT
    assert restart.job_class == applied({})


@pytest.mark.parametrize(
    ("now", "reason", "says"),
    [
        (JobClasses(), "JobClassNotFound", "there is no GRPOJobClass h100"),
        (classes({"limits": {"gpus": 2}}), "RefusedByJobClass", "the plan takes 4 GPUs"),
        (classes({"limits": {"requiredLabels": ["team"]}}), "RefusedByJobClass", "team is missing"),
    ],
)
async def test_a_gang_whose_class_has_gone_or_refuses_it_gives_its_place_back_and_waits(
    now: JobClasses, reason: str, says: str
) -> None:
    active = gpu_job_active(to_json_class(applied({}, 1)))
    asked = replace(ASK, ended=Outcome(result=Result.ERROR))
    found = await queue([active], cluster(8, job_classes=now)).answer(make_seen(active), asked)
    assert found
    assert (found.action, found.reason, found.ended) == (Action.QUEUE, reason, asked.ended)
    assert says in found.message


def gpu_job_active(applied_json: dict[str, Any]) -> Any:
    status = active_status(plan=gang(1, 4), jobClass=applied_json)
    return make_job({"placement": GPU, **NAMED}, status)


def test_prices_of_a_class_go_before_the_nodes() -> None:
    product = "NVIDIA-H100-80GB-HBM3"
    spec = resolved({}, {"platform": {"gpuHourPrices": {product: 2.5}}})
    found = Capacity(cluster(8), ()).usable_by(spec)
    assert {node.gpu_hour_price for node in found.nodes} == {2.5}
