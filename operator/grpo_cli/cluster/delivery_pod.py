"""Makes the Job of a delivery as the operator made the job's last pods."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.job_object import GRPOJob
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import ResumeSource
from grpo_api.text.contract import CONTAINER
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt
from grpo_operator.pods.pod_spec import USER_HELP, PodDefaults, defaults_from_flags, pod_user
from grpo_operator.pods.pod_volumes import Manifest
from grpo_operator.records.names import child_job, inheritable_metadata

from ..show.errors import NotYet, OptionError
from . import kubectl
from .claims import pin_to_claims
from .delivery import Delivery, export_job
from .job_pods import find_job


def add_pod_arguments(parser: ArgumentParser) -> None:
    """The flags that say which cluster, and what the pod is made of."""
    parser.add_argument("--image", help="trainer image of the pod. Unset: the job's own")
    parser.add_argument(
        "--pod-user",
        type=pod_user,
        default=SUPPRESS,
        metavar="ID",
        help=f"{USER_HELP}. Unset: the job's own",
    )
    parser.add_argument(
        "--timeout", type=int, default=600, help="longest wait for the pod, in seconds. Unset: 600"
    )
    kubectl.add_arguments(parser)


def start_delivery(
    options: Namespace, metadata: dict[str, Any], job: GRPOJob, **wanted: Any
) -> AbstractContextManager[Delivery]:
    """A delivery of what is wanted of a job (arguments of export_job), which leaves nothing behind.

    Raises:
        NotYet: the job has no plan.
        OptionError: the trainer's image is unknown.
    """
    manifest, holder = pin_to_claims(options, _manifest(options, metadata, job, wanted))
    return Delivery(options, manifest, holder).deleted_afterwards()


def _manifest(
    options: Namespace, metadata: dict[str, Any], job: GRPOJob, wanted: dict[str, Any]
) -> Manifest:
    """The Job to create, of a job whose plan is known."""
    if job.status.plan is None:
        raise NotYet(f"{metadata['name']} has no plan: the operator has not seen it")
    last = build_attempt(metadata, job.spec, job.status.plan, max(1, job.status.attempt), None)
    last = replace(last, revisions=job.status.revisions or {})
    if options.image:
        last = replace(last, spec=last.spec.model_copy(update={"image": options.image}))
    return export_job(last, _pods(options, last), **wanted)


def _pods(options: Namespace, last: Attempt) -> PodDefaults:
    """What the operator chose for the last attempt's pods, read from its Job."""
    name = child_job(last.key.name, last.number)
    attempt_job = find_job(options, name)
    pods = (
        defaults_of_pod(attempt_job["spec"]["template"]["spec"]) if attempt_job else PodDefaults()
    )
    if not (pods.image or last.spec.image):
        raise OptionError(
            f"Job {name}, which names the trainer's image, is gone: name it by --image"
        )
    return replace(pods, user=options.pod_user) if "pod_user" in options else pods


def defaults_of_pod(pod: dict[str, Any]) -> PodDefaults:
    """Return the operator's defaults that a training pod was created with."""
    images = [
        container["image"] for container in pod["containers"] if container["name"] == CONTAINER
    ]
    pull_secrets = tuple(secret["name"] for secret in pod.get("imagePullSecrets", ()))
    return PodDefaults(
        image=images[0] if images else "",
        user=pod.get("securityContext", {}).get("runAsUser"),
        pull_secrets=pull_secrets,
    )


TRAINER_IMAGE = "grpo-trainer"
"""Placeholder for the operator's image where no flag gives one, in objects that are only shown."""


def pods_with_image(options: Namespace, name: str, spec: GRPOJobSpec) -> PodDefaults:
    """What the flags say of a job's pods, which are to be created.

    Raises:
        OptionError: neither they nor the spec name the trainer's image.
    """
    pods = defaults_from_flags(options)
    if not (pods.image or spec.image):
        raise OptionError(
            f"{name}: spec.image is unset: name the trainer's image by --trainer-image"
        )
    return pods


def build_attempt(
    metadata: dict[str, Any],
    spec: GRPOJobSpec,
    plan: ExecutionPlan,
    number: int,
    source: ResumeSource | None,
) -> Attempt:
    """The attempt of a GRPOJob with this metadata."""
    return Attempt(
        key=ObjectKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        spec=spec,
        plan=plan,
        number=number,
        labels=inheritable_metadata(metadata.get("labels")),
        annotations=inheritable_metadata(metadata.get("annotations")),
        source=source,
    )
