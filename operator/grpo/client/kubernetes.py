"""Jobs of a cluster, by the user's kubectl: its contexts, credentials and plug-ins are the
client's, too."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_api.report.history import Row
from grpo_api.text.contract import CONTAINER
from grpo_cli.cluster import kubectl
from grpo_cli.commands.export import fetch_model
from grpo_cli.commands.jobs import change
from grpo_cli.commands.logs import find_pod
from grpo_cli.inputs import job_classes, manifest, plan_inputs
from grpo_cli.inputs.run_history import load_job_history
from grpo_cli.show.errors import OptionError
from grpo_planner.result.result import PlanResult

from .job import Event, Job, job_of, readable_jobs

POD_SECONDS = 600
"""Longest wait for a pod that reads a volume."""


class Kubernetes:
    """The cluster of a kubeconfig's context."""

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        """Take a context (None: the current one) and a namespace (None: the context's)."""
        self._options = Namespace(context=context, namespace=namespace)

    def plan(self, job: manifest.Job) -> PlanResult:
        """Plan on the cluster's nodes, with the class that the job has there."""
        job_class = job_classes.class_in_cluster(self._options, job.spec)
        spec = job_classes.with_class(job.spec, job_class, job.metadata)
        options = plan_inputs.planning_options(context=self._options.context or ".")
        return plan_inputs.make_plan(options, spec)

    def create(self, job: manifest.Job) -> str:
        """Create the object.

        Raises:
            OptionError: it names another namespace, in which no method would find it.
        """
        namespace = job.metadata.get("namespace")
        if namespace and not self._options.namespace:
            own_namespace = kubectl.context_namespace(self._options)
            if namespace != own_namespace:
                raise OptionError(
                    f"metadata.namespace is {namespace}, and the client's is {own_namespace}: use "
                    f"Kubernetes(namespace={namespace!r})"
                )
        return kubectl.create_object(self._options, manifest.document_of(job))

    def jobs(self) -> list[Job]:
        """All GRPOJobs of the namespace that can be read."""
        items = kubectl.get_json(self._options, kubectl.RESOURCE)["items"]
        return readable_jobs(items, kubectl.read_job)

    def job(self, name: str) -> Job:
        """The GRPOJob."""
        return job_of(*kubectl.get_job(self._options, name))

    def log_lines(self, name: str, rank: int, *, follow: bool) -> Iterator[str]:
        """The log of the rank's pod."""
        wanted = self._with_options(name=name, attempt=None, rank=rank, engine=None)
        flags = ["--follow"] if follow else []
        chunks = kubectl.stream_output(
            self._options, "logs", find_pod(wanted), f"--container={CONTAINER}", *flags
        )
        rest = b""
        for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def events(self, name: str) -> list[Event]:
        """Events about the GRPOJob, oldest first."""
        # Events of a deleted job of the same name stay for an hour.
        uid = kubectl.get_object_of_job(self._options, name)["metadata"]["uid"]
        selector = f"--field-selector=involvedObject.uid={uid}"
        items = kubectl.get_json(self._options, "events", selector)["items"]
        events = [
            Event(
                item.get("type") or "",
                item.get("reason") or "",
                item.get("message") or "",
                kubectl.event_time(item),
            )
            for item in items
        ]
        return sorted(events, key=lambda event: event.time)

    def rows(self, name: str, file: str) -> list[Row]:
        """A history file, which a short-lived pod reads."""
        return load_job_history(self._with_options(image=None, timeout=POD_SECONDS), name, file)

    def suspend(self, name: str) -> None:
        """As `grpo suspend` does."""
        change.suspend_job(self._options, name)

    def resume(self, name: str) -> None:
        """As `grpo resume` does."""
        change.resume_job(self._options, name)

    def retry(self, name: str) -> None:
        """As `grpo retry` does, of a job that has failed."""
        change.retry_job(self._options, name)

    def export(self, name: str, folder: Path) -> None:
        """Download the model; every file is checked."""
        fetch_model(
            self._with_options(
                name=name, to=folder, merge=False, dtype=None, image=None, timeout=POD_SECONDS
            )
        )

    def delete(self, name: str) -> None:
        """As `grpo delete` does."""
        change.delete_job(self._options, name)

    def _with_options(self, **options: Any) -> Namespace:
        return Namespace(**vars(self._options), **options)
