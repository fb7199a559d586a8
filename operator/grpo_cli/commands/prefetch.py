"""`grpo prefetch`: fills a job's cache of the hub before the job holds GPUs.

A Job in the cluster does the work and goes on if the command ends. The same command, run again,
follows that Job.

The Job's pod is the training pod without GPUs, checkpoints and peers. The same spec always gives
the same Job.
"""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.spec.checkpoint import CheckpointSpec
from grpo_api.text.contract import CONTAINER, PLAN_ANNOTATION
from grpo_api.text.messages import printable_text
from grpo_kube.objects.resources import Object
from grpo_operator.pods import pod_spec as pod_defaults
from grpo_operator.pods.manifests import training_plan
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.pods.preflight_job import CPU_PLAN, IGNORE_DISRUPTIONS, cpu_job, cpu_spec
from grpo_operator.records.names import LABEL_APP, LABEL_INSTANCE

from ..cluster import job_pods, kubectl
from ..cluster.claims import Holder, pin_to_claims
from ..cluster.delivery_pod import build_attempt, pods_with_image
from ..inputs import job_classes
from ..inputs.manifest import Job, add_filename, load_specs
from ..show.errors import NotYet, OptionError

FAILED = 1
"""Exit code where something was not fetched."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("name", nargs="?", help="a GRPOJob of the cluster, such as a suspended one")
    add_filename(source)
    pod_defaults.add_arguments(parser, "")
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Fills the cache of one job after the other; 0 once all is there, 1 where something was not
    fetched."""
    jobs = _jobs(options)
    # A file's last job is refused before the minutes that the first one's cache takes.
    for job in jobs:
        if job.spec.model.cache is None:
            raise OptionError(
                f"{job.metadata['name']}: spec.model.cache is unset, so there is nothing to fill: "
                "name the claim to share there"
            )
    return max(_fill_cache(options, job) for job in jobs)


def _jobs(options: Namespace) -> list[Job]:
    """The jobs. A file may name the namespace, as kubectl takes it."""
    if options.name is not None:
        metadata, job = kubectl.get_job(options, options.name)
        # an attempt has given it its class already
        spec = job.spec if job.status.job_class else _with_class(options, metadata, job.spec)
        return [Job(metadata, spec)]
    jobs = load_specs(options.filename)
    named = {job.metadata["namespace"] for job in jobs if job.metadata.get("namespace")}
    if len(named) > 1 and not options.namespace:
        raise OptionError(
            f"{options.filename} has jobs of several namespaces: {', '.join(sorted(named))}; give "
            "one by -n"
        )
    options.namespace = options.namespace or next(iter(named), None)
    return jobs


def _with_class(options: Namespace, metadata: dict[str, Any], spec: GRPOJobSpec) -> GRPOJobSpec:
    """The spec with the class that the cluster has for it."""
    return job_classes.with_class(spec, job_classes.class_in_cluster(options, spec), metadata)


def _fill_cache(options: Namespace, job: Job) -> int:
    """Fills one job's cache."""
    name, spec = job.metadata["name"], job.spec
    if not hub_names(spec):
        print(f"{name}: nothing to fetch: its models and its dataset are folders")
        return 0
    if options.filename is not None:
        spec = _with_class(options, job.metadata, spec)
    pods = pods_with_image(options, name, spec)
    body = prefetch_job({**job.metadata, "namespace": options.namespace or ""}, spec, pods)
    holder = _start(options, body)
    return _follow_job(options, prefetch_name(name), holder)


def _start(options: Namespace, body: Object) -> Holder | None:
    """Creates the Job, unless the same is at work already; one that has ended makes room. Returns
    for whose sake there is one node only that it can run on."""
    name = body["metadata"]["name"]
    there = job_pods.find_job(options, name)
    if there and not job_pods.job_end(there):
        if _plan(there) != _plan(body):
            raise NotYet(
                f"job {name} is fetching what an earlier version of the spec named; wait for it, "
                "or delete it"
            )
        return None
    if there:
        kubectl.run_kubectl(options, "delete", "job", name, "--wait")
    pinned_job, holder = pin_to_claims(options, body)
    del pinned_job["metadata"]["namespace"]  # it may be the context's
    kubectl.create_object(options, pinned_job)
    return holder


def _plan(job: Object) -> str:
    """What a Job fetches."""
    annotations = job["spec"]["template"]["metadata"].get("annotations") or {}
    return str(annotations.get(PLAN_ANNOTATION, ""))


def _follow_job(options: Namespace, name: str, holder: Holder | None) -> int:
    """Shows the Job's pods' logs, one after the other, until it has ended."""
    shown: set[str] = set()
    for job, pods in job_pods.follow_job(options, name, holder):
        if job is None:
            raise NotYet(f"job {name} was deleted")
        for pod in filter(_has_log, pods):
            pod_name = pod["metadata"]["name"]
            if pod_name not in shown:
                shown.add(pod_name)
                print(f"job {name}: pod {pod_name}", flush=True)
                subprocess.run(kubectl.command(options, "logs", "--follow", pod_name), check=False)
        if end := job_pods.job_end(job):
            return _print_end(end, pods)
    raise AssertionError("following has no end")


def _has_log(pod: Object) -> bool:
    """True if the pod has a log."""
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _print_end(end: str, pods: list[Object]) -> int:
    """Prints how it ended, by the last pod's words; the exit code."""
    youngest_last = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    messages = list(filter(None, map(_last_message, youngest_last)))
    last = messages[-1] if messages else "no pod said how it ended"
    print(printable_text(last), file=sys.stdout if end == "Complete" else sys.stderr)
    return 0 if end == "Complete" else FAILED


def _last_message(pod: Object) -> str:
    """A pod's last words, of its outcome where it left one."""
    for text in job_pods.termination_messages(pod):
        try:
            return Outcome.model_validate_json(text).message
        except ValidationError:
            return text.strip()
    return ""


KEEP_SECONDS = 86_400
"""How long a finished Job stays, for its log."""
COMMAND = ["python", "-m", "grpo_trainer.prefetch"]


def prefetch_name(job: str) -> str:
    """Name of the Job; a GRPOJob's own end with a number."""
    return f"{job}-prefetch"


def hub_names(spec: GRPOJobSpec) -> list[str]:
    """Return the hub names of the models and the dataset that the job fetches; folders need no
    fetching."""
    named = [spec.model.name]
    named += [reward.model.name for reward in spec.rewards if reward.model]
    if spec.dataset.name:
        named.append(spec.dataset.name)
    return [name for name in named if not name.startswith("/")]


def prefetch_job(
    metadata: Mapping[str, Any], spec: GRPOJobSpec, pods: PodDefaults
) -> dict[str, Any]:
    """The Job for the GRPOJob with this metadata; `pods` is what its pod has by default."""
    name = prefetch_name(metadata["name"])
    attempt = build_attempt({**metadata, "uid": name}, _fetch_spec(spec), CPU_PLAN, 1, None)
    labels = {LABEL_APP: "grpo-prefetch", LABEL_INSTANCE: metadata["name"]}
    policy = {
        "backoffLimit": spec.restarts.limit,
        "podFailurePolicy": {"rules": _FAILURES},
        "ttlSecondsAfterFinished": KEEP_SECONDS,
    }
    plan = training_plan(attempt)
    return cpu_job(name, attempt, plan, labels=labels, policy=policy, pods=pods)


def _fetch_spec(spec: GRPOJobSpec) -> GRPOJobSpec:
    """The spec without what only training needs: GPUs, peers, checkpoints, and what runs before
    it."""
    settings = spec.pod_template.spec.model_copy(update={"init_containers": []})
    template = spec.pod_template.model_copy(update={"spec": settings})
    changes = {"checkpoint": CheckpointSpec(), "resume_from": None, "pod_template": template}
    return cpu_spec(spec.model_copy(update=changes), COMMAND)


_FAILURES = [
    IGNORE_DISRUPTIONS,
    {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": CONTAINER,
            "operator": "In",
            "values": [EXIT_CODES[Result.BAD_INPUT]],
        },
    },
]
"""What the hub refuses it would refuse again."""
