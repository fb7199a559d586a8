"""Runs the short-lived Job through which `grpo export`, `history` and `samples` read a job's volume
or object store.

The Job's pod is the job's training pod without the training. It has the same image, user, claim,
credentials and node selection, because a pod that could write the model can also read it.

The Job is created when it is needed, and created again when it is lost. Nothing of it remains. It
is deleted however the command ends: after the last byte, on an error, on Ctrl-C or when the
terminal closes. If the laptop is gone before that, the pod ends once no request comes any more, and
the Job's TTL deletes it.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pydantic import ValidationError

from grpo_api.pods.platform import VOLUME_PREFIX
from grpo_api.report.artifacts import Listing
from grpo_api.text.clock import Clock
from grpo_api.text.contract import (
    API_VERSION,
    CACHE_VOLUME,
    CHECKPOINT_STORE_ENV,
    CHECKPOINT_VOLUME,
    CONTAINER,
    GROUP,
    KIND,
    MODEL_VOLUME,
    PLAN_VOLUME,
    SCRATCH_VOLUME,
)
from grpo_api.text.messages import printable_text
from grpo_api.text.quantity import parameter_count
from grpo_api.text.units import GIB
from grpo_kube.objects.resources import Object
from grpo_operator.pods.manifests import Attempt, indexed_job
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.pods.pod_volumes import Manifest
from grpo_operator.records.names import LABEL_APP, LABEL_COMPONENT, LABEL_INSTANCE

from ..show.errors import KubectlError, ending_signals_interrupt
from . import kubectl
from .claims import Holder
from .clock import SYSTEM_CLOCK
from .download import PAUSES, require_safe
from .job_pods import find_pods, waiting_message

DELIVERY = ("python", "-m", "grpo_trainer.delivery")
LIFETIME_SECONDS = 86400
"""Longest life of the pod; a download that takes longer goes on through another one."""
TTL_SECONDS = 60
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_KEPT = (
    "securityContext",
    "tolerations",
    "serviceAccountName",
    "imagePullSecrets",
    "runtimeClassName",
    "dnsPolicy",
    "dnsConfig",
)
_READS: Manifest = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "1", "memory": "512Mi"},
}


def export_job(
    attempt: Attempt,
    pods: PodDefaults,
    *,
    merge: bool = False,
    dtype: str | None = None,
    history: bool = False,
) -> Manifest:
    """The batch/v1 Job that hands out what this job has exported, as it is or converted, or its
    history."""
    platform = attempt.spec.platform.of_cpu_pods
    attempt = replace(attempt, spec=attempt.spec.on_platform(platform))
    template = indexed_job(attempt, pods)["spec"]["template"]
    name = attempt.key.name
    pod_labels = {LABEL_APP: "grpo-export", LABEL_INSTANCE: name, LABEL_COMPONENT: "export"}
    # Of a training pod's labels the user's: by ours it would pass for one.
    ours = (f"{GROUP}/", "app.kubernetes.io/")
    labels = {
        key: value
        for key, value in template["metadata"]["labels"].items()
        if not key.startswith(ours)
    }
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": attempt.uid}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "generateName": f"{name}-export-",
            "labels": pod_labels,
            "ownerReferences": [owner],
        },
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": LIFETIME_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": {
                "metadata": {
                    "labels": labels | pod_labels,
                    "annotations": template["metadata"]["annotations"],
                },
                "spec": _pod(template["spec"], attempt, merge, dtype, history=history),
            },
        },
    }


def _pod(
    training: Manifest, attempt: Attempt, merge: bool, dtype: str | None, *, history: bool
) -> Manifest:
    """Return the spec of the export's pod, made of the training pod's spec."""
    volumes = {PLAN_VOLUME, SCRATCH_VOLUME, CHECKPOINT_VOLUME}
    volumes |= {f"{VOLUME_PREFIX}{volume.name}" for volume in attempt.spec.platform.volumes}
    if merge:
        volumes |= {MODEL_VOLUME, CACHE_VOLUME}
    (trainer,) = (
        container for container in training["containers"] if container["name"] == CONTAINER
    )
    converts = merge or dtype is not None
    container: Manifest = {
        "name": "export",
        "image": trainer["image"],
        "imagePullPolicy": trainer["imagePullPolicy"],
        "command": _command(merge, dtype, history=history),
        "env": _variables(trainer, merge),
        "resources": _conversion_resources(attempt, dtype) if converts else _READS,
        "securityContext": trainer["securityContext"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            _mount(mount) for mount in trainer["volumeMounts"] if mount["name"] in volumes
        ],
    }
    sources = trainer.get("envFrom", ())
    if not merge:
        sources = [source for source in sources if source.get("prefix") == CHECKPOINT_STORE_ENV]
    if sources:
        container["envFrom"] = list(sources)
    pod: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [volume for volume in training["volumes"] if volume["name"] in volumes],
        **{field: training[field] for field in _KEPT if field in training},
    }
    selector = attempt.spec.placement.node_selector
    return {**pod, "nodeSelector": dict(selector)} if selector else pod


def _variables(trainer: Manifest, merge: bool) -> list[Manifest]:
    """Plain values, and for a merge the hub's token: it fetches the base model."""
    names = ("HF_TOKEN",) if merge else ()
    return [each for each in trainer["env"] if "value" in each or each["name"] in names]


def _command(merge: bool, dtype: str | None, *, history: bool) -> list[str]:
    flags = {"--history": history, "--merge": merge}
    command = [*DELIVERY, "serve", *(flag for flag, is_set in flags.items() if is_set)]
    return [*command, "--dtype", dtype] if dtype else command


def _mount(mount: Manifest) -> Manifest:
    """Nothing is written but into the pod's own scratch folder, and by a merge into the hub's
    cache."""
    return mount if mount["name"] in (SCRATCH_VOLUME, CACHE_VOLUME) else {**mount, "readOnly": True}


def _conversion_resources(attempt: Attempt, dtype: str | None) -> Manifest:
    """What a conversion needs: the whole model in memory, once more while it is written, and on the
    node's disk.

    Requests without limits, as of a training pod whose memory is predicted: they may be low.
    """
    parameters = attempt.plan.parameters or attempt.spec.model.parameters
    model = 0
    if parameters:
        model = parameter_count(parameters) * DTYPE_BYTES[dtype or attempt.plan.dtype]
    copies = (
        2 if attempt.spec.checkpoint.store else 1
    )  # what is on a store is brought before it is converted
    memory, disk = 2 * model + 2 * GIB, copies * model + GIB
    return {"requests": {"cpu": "1", "memory": str(memory), "ephemeral-storage": str(disk)}}


POLL_SECONDS = 1.0


class Delivery:
    """The export of one job behind `kubectl exec`."""

    def __init__(
        self,
        options: Namespace,
        manifest: Manifest,
        holder: Holder | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Makes nothing yet; `options.timeout` is the longest wait for a pod, in seconds.

        `holder`: the pod for whose sake there is one node only that the Job's pod can run on.
        """
        self._options = options
        self._manifest = manifest
        self._holder = holder
        self._clock = clock
        self._job = self._pod = ""
        self._listing: Listing | None = None

    def wait_for_listing(self) -> Listing:
        """All files, once the pod has them ready.

        Raises:
            KubectlError: there is no pod, it can't hand out the export, or another than before.
        """
        for pause in (*PAUSES, None):
            self._require_pod()
            try:
                listing = _read_listing(
                    kubectl.run_kubectl(self._options, *self._exec_arguments("list"))
                )
            except KubectlError as error:
                self._require_alive()
                if pause is None or "(Forbidden)" in str(error):
                    raise
                self._clock.sleep(pause)
                continue
            if self._listing not in (None, listing):
                raise KubectlError(
                    "the export is another one than it was at the beginning; run the same command "
                    "again"
                )
            self._listing = listing
            return listing
        raise AssertionError("the last try returns or raises")

    def read_file(self, name: str, offset: int) -> Iterable[bytes]:
        """The bytes of a file from there on.

        Raises:
            KubectlError: the connection was cut, or the pod is lost.
        """
        if not self._pod:
            self.wait_for_listing()
        try:
            yield from kubectl.stream_output(
                self._options, *self._exec_arguments("send", "--", name, str(offset))
            )
        except KubectlError:
            if self._phase() != "Running":
                self._delete_job()
            raise

    def _exec_arguments(self, *question: str) -> tuple[str, ...]:
        return ("exec", self._pod, "--container=export", "--", *DELIVERY, *question)

    def _require_pod(self) -> None:
        if self._pod and self._phase() == "Running":
            return
        self._delete_job()
        self._job = kubectl.create_object(self._options, self._manifest)
        self._pod = self._wait_for_pod()

    def _wait_for_pod(self) -> str:
        """Name of the Job's pod, once it runs."""
        deadline, shown_reason = self._clock.now() + self._options.timeout, ""
        while True:
            pods = find_pods(self._options, self._job)
            phase, end = _state(pods)
            if phase == "Running":
                name: str = pods[0]["metadata"]["name"]
                return name
            if phase in ("Succeeded", "Failed"):
                raise KubectlError(f"the pod of {self._job} ended: {end or phase}")
            why = waiting_message(self._options, self._job, pods, self._holder)
            if not pods:
                why = why or "it has not been created"
            if self._clock.now() > deadline:
                raise KubectlError(
                    f"the pod of {self._job} does not run after {self._options.timeout} s: {why}"
                )
            if why != shown_reason:
                reason = printable_text(why)
                print(f"waiting for the pod of {self._job}: {reason}", file=sys.stderr)
                shown_reason = why
            self._clock.sleep(POLL_SECONDS)

    def _phase(self) -> str:
        """The pod's phase; empty if it is gone, and Running if it can't be read now."""
        try:
            return _state(find_pods(self._options, self._job))[0]
        except KubectlError:
            return "Running"

    def _require_alive(self) -> None:
        """Raise KubectlError with the pod's own message if it has failed."""
        phase = end = ""
        with suppress(KubectlError):
            phase, end = _state(find_pods(self._options, self._job))
        if phase == "Failed" and end:
            raise KubectlError(f"it can't be handed out: {end}")

    def _delete_job(self) -> None:
        """Deletes the Job; a Job that can't be deleted now goes by its own deadline."""
        job, self._job, self._pod = self._job, "", ""
        if job:
            with suppress(KubectlError):
                kubectl.run_kubectl(
                    self._options, "delete", "job", job, "--ignore-not-found", "--wait=false"
                )

    @contextmanager
    def deleted_afterwards(self) -> Iterator["Delivery"]:
        """Delete the Job from the cluster when the block ends, by whatever way it ends."""
        with ending_signals_interrupt():
            try:
                yield self
            finally:
                self._delete_job()


def _read_listing(text: str) -> Listing:
    try:
        listing = Listing.model_validate_json(text.strip())
    except ValidationError as error:
        raise KubectlError(f"the pod's answer is no list of files: {text.strip()!r:.80}") from error
    require_safe(listing)
    return listing


def _state(pods: list[Object]) -> tuple[str, str]:
    """Return the phase of the Job's pod, empty while it has none, and how the pod ended."""
    status = pods[0].get("status", {}) if pods else {}
    containers = status.get("containerStatuses") or [{}]
    ended = containers[0].get("state", {}).get("terminated") or {}
    end = kubectl.reason_and_message(ended) or kubectl.reason_and_message(status)
    phase = status.get("phase", "")
    # the kubelet sets a pod's phase a moment after its container's end
    if ended and phase == "Running":
        phase = "Failed" if ended.get("exitCode") else "Succeeded"
    return phase, end
