"""GRPOClient: one set of methods for jobs of a cluster and of this machine.

Methods that Kubeflow's TrainerClient has, too, have its names and arguments (kubeflow/sdk,
kubeflow/trainer/api/trainer_client.py).
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol

from grpo_api.job import GRPOJobSpec
from grpo_api.report.history import METRICS_FILE, SAMPLES_FILE, Row, standing_rows
from grpo_api.status.status import Phase
from grpo_api.text.clock import Clock
from grpo_api.text.messages import value_text
from grpo_cli.cluster.clock import SYSTEM_CLOCK
from grpo_cli.cluster.job_end import is_retry_pending, poll_job
from grpo_cli.inputs import manifest
from grpo_cli.show.errors import CliError, OptionError
from grpo_planner.result.result import PlanResult

from .job import Event, Job
from .kubernetes import Kubernetes

ENDED = (Phase.SUCCEEDED, Phase.FAILED)
PHASES = frozenset(phase.value for phase in Phase)


class JobFailed(CliError):
    """A job has ended otherwise than its caller waits for; the message says how."""


class Backend(Protocol):
    """Where jobs run. Every method raises GRPOError with a sentence for the user."""

    def plan(self, job: manifest.Job) -> PlanResult: ...
    def create(self, job: manifest.Job) -> str: ...
    def jobs(self) -> list[Job]: ...
    def job(self, name: str) -> Job: ...
    def log_lines(self, name: str, rank: int, *, follow: bool) -> Iterator[str]: ...
    def events(self, name: str) -> list[Event]: ...
    def rows(self, name: str, file: str) -> list[Row]: ...
    def suspend(self, name: str) -> None: ...
    def resume(self, name: str) -> None: ...
    def retry(self, name: str) -> None: ...
    def export(self, name: str, folder: Path) -> None: ...
    def delete(self, name: str) -> None: ...


class GRPOClient:
    """Plans, starts and watches GRPOJobs. Errors are GRPOErrors, whose message names the field, its
    value, what is allowed and what to do."""

    def __init__(self, backend: Backend | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Take where jobs run: Kubernetes(…), the default, or LocalProcess(…)."""
        self._backend = backend or Kubernetes()
        self._clock = clock

    def plan(self, job: Mapping[str, Any] | GRPOJobSpec) -> PlanResult:
        """Return how the job would run, or why it can't, without starting it."""
        return self._backend.plan(manifest.read_job(_document(job, None)))

    def train(self, job: Mapping[str, Any] | GRPOJobSpec, name: str | None = None) -> str:
        """Start a job and return its name.

        Args:
            job: a GRPOJob object as YAML has it, or its spec.
            name: of the job, where `job` is a spec, or instead of metadata.name.
        """
        return self._backend.create(manifest.read_job(_document(job, name)))

    def list_jobs(self) -> list[Job]:
        """Return all jobs of the namespace or folder."""
        return self._backend.jobs()

    def get_job(self, name: str) -> Job:
        """Return a job with its status as it is now."""
        return self._backend.job(name)

    def get_job_logs(self, name: str, rank: int = 0, follow: bool = False) -> Iterator[str]:
        """Yield the lines that a rank of the last attempt printed; with `follow` also those to
        come."""
        return self._backend.log_lines(name, rank, follow=follow)

    def get_job_events(self, name: str) -> list[Event]:
        """Return what happened to a job, oldest first."""
        return self._backend.events(name)

    def wait_for_job_status(
        self,
        name: str,
        status: Collection[str] = frozenset({Phase.SUCCEEDED}),
        timeout: float = 600,
        polling_interval: float = 2,
    ) -> Job:
        """Return the job once its phase is one of `status`.

        Raises:
            TimeoutError: it is not so after `timeout` seconds.
            JobFailed: it has ended with another phase.
        """
        wanted = _wanted_phases(status)
        _require_seconds("timeout", timeout)
        _require_seconds("polling_interval", polling_interval)
        deadline = self._clock.now() + timeout
        phase = "unknown"
        for job in self._poll_job(name, min(polling_interval, timeout)):
            if job:
                phase = f"{job.phase} ({job.status.reason})" if job.status.reason else job.phase
            if job and job.phase in wanted:
                return job
            if job and _has_ended(job):
                why = job.message or job.status.reason or "it left no outcome; read its log"
                raise JobFailed(f"{name} is {job.phase}: {why}")
            if self._clock.now() >= deadline:
                phases = " or ".join(sorted(wanted))
                raise TimeoutError(f"{name} is {phase} after {timeout:g} s, not {phases}")
        raise AssertionError("polling has no end")

    def watch(self, name: str, polling_interval: float = 2) -> Iterator[Job]:
        """Yield the job now, at each change of its status, and when it has ended."""
        _require_seconds("polling_interval", polling_interval)
        last: Job | None = None
        for job in self._poll_job(name, polling_interval):
            if job is None:
                continue
            if job != last:
                yield job
            if _has_ended(job):
                return
            last = job

    def history(self, name: str) -> list[Row]:
        """Return the row of each logged step that the run consists of, with TRL's keys."""
        return standing_rows(self._backend.rows(name, METRICS_FILE))

    def samples(self, name: str) -> list[Row]:
        """Return the sampled steps: prompts, each with all its completions and their rewards."""
        return self._backend.rows(name, SAMPLES_FILE)

    def suspend(self, name: str) -> None:
        """Pause a job; its processes end after a checkpoint."""
        self._backend.suspend(name)

    def resume(self, name: str) -> None:
        """Continue a suspended job from its newest checkpoint."""
        self._backend.resume(name)

    def retry(self, name: str) -> None:
        """Start a failed job again from its newest checkpoint."""
        self._backend.retry(name)

    def export(self, name: str, folder: str | Path) -> Path:
        """Bring the trained model into a folder, which is made, and return that."""
        place = Path(folder)
        self._backend.export(name, place)
        return place

    def delete_job(self, name: str) -> None:
        """End a job and delete it. Its volumes, with checkpoints and model, stay."""
        self._backend.delete(name)

    def _poll_job(self, name: str, seconds: float) -> Iterator[Job | None]:
        return poll_job(lambda: self._backend.job(name), seconds, self._clock)


def _has_ended(job: Job) -> bool:
    """True unless the job goes on, or is about to be tried again."""
    return job.phase in ENDED and not is_retry_pending(job.spec, job.status)


def _wanted_phases(status: str | Collection[str]) -> list[str]:
    """The phase, or the phases, that a caller waits for."""
    is_several = isinstance(status, Iterable) and not isinstance(status, str)
    wanted: list[str] = list(status) if is_several else [str(status)]
    unknown = [str(phase) for phase in wanted if str(phase) not in PHASES]
    if unknown or not wanted:
        raise OptionError(f"status is {unknown or 'empty'}; it takes {', '.join(sorted(PHASES))}")
    return wanted


def _require_seconds(name: str, seconds: object) -> None:
    """Refuse what is no time to wait."""
    if not (isinstance(seconds, Real) and float(seconds) >= 0):
        raise OptionError(f"{name} is {value_text(seconds)}; it takes seconds, 0 or more")


def _document(job: Mapping[str, Any] | GRPOJobSpec, name: str | None) -> dict[str, Any]:
    """The job as YAML has it."""
    if isinstance(job, GRPOJobSpec):
        return manifest.document_of(manifest.Job({"name": name or "job"}, job))
    if not isinstance(job, Mapping):
        raise OptionError(
            f"the job is {value_text(job)}; it takes a dict or a GRPOJobSpec, such as "
            "load_jobs(file)[0]"
        )
    document = dict(job)
    metadata = document.get("metadata") or {}
    if name and isinstance(metadata, Mapping):
        document["metadata"] = {**metadata, "name": name}
    # The spec's own check says what is wrong with an object that YAML can't have.
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        document = json.loads(json.dumps(document, default=_yaml_value))
    return document


def _yaml_value(value: Any) -> Any:
    """A path as a text, and a scalar of numpy or torch as Python's."""
    return fspath(value) if isinstance(value, PathLike) else value.item()
