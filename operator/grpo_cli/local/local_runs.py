"""Runs of jobs as processes of this machine, in a folder.

    <folder>/_volumes/<claim>/       a claim that no option maps to another folder
    <folder>/<job>/job.json          metadata and spec, as the run was started with
    <folder>/<job>/lock              locked for as long as the trainer lives
    <folder>/<job>/mounts/…          links to what a pod would see at the same paths
    <folder>/<job>/attempt-N/        plan.json, process.json, log.txt, outcome.json

A run outlives the process that started it. The lock tells any other process whether it goes on: a
process id alone may have become another program's.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.job_object import GRPOJob
from grpo_api.plan.plan import TrainingPlan
from grpo_api.pods.platform import PlatformSpec
from grpo_api.report.history import METRICS_FILE, Row
from grpo_api.report.report import Outcome
from grpo_api.status.status import Phase, ResumeSource
from grpo_api.text.contract import (
    ATTEMPT_PREFIX,
    EXPORT_FOLDER,
    MODEL_MOUNT,
    PLAN_ENV,
    PROGRESS_BIND_ENV,
    TERMINATION_LOG_ENV,
)
from grpo_api.text.quantity import format_bytes
from grpo_operator.pods.manifests import Attempt, plan_json, training_plan
from grpo_operator.records.names import checkpoint_volume, run_folder
from grpo_planner.result.result import PlanResult

from ..cluster.clock import SYSTEM_CLOCK
from ..cluster.delivery_pod import build_attempt
from ..cluster.kubectl import version_error
from ..inputs import plan_inputs
from ..inputs.job_classes import class_of, with_class
from ..inputs.local_preflight import require_trainer
from ..inputs.manifest import Job, document_of, with_own_name
from ..inputs.run_history import load_history
from ..show.errors import NotYet, OptionError
from .attempt_state import (
    LOCK_FILE,
    LOG_FILE,
    OUTCOME_FILE,
    PLAN_FILE,
    PROCESS_FILE,
    deferred_signals,
    is_running_in,
    newest_attempt,
    read_outcome,
    read_process,
    read_status,
    take_lock,
    write_whole,
)
from .local_pod import (
    LOCAL_ADDRESS,
    ClaimFolder,
    ConfigMaps,
    LocalContainer,
    LocalPod,
    MountSource,
    config_map_problems,
    local_plan,
    local_pod,
    local_spec,
    mount_variables,
)

NAMESPACE = "local"
VOLUMES = "_volumes"
"""No name of a job."""
JOB_FILE = "job.json"
"""Written before the first attempt: what has it is a run."""
KILL_SECONDS = 30.0
"""Longest wait for the end of a trainer after SIGTERM."""
POLL_SECONDS = 0.1


class LocalJob(NamedTuple):
    """A job of the folder."""

    metadata: dict[str, Any]
    job: GRPOJob


class LocalRuns:
    """The runs of one folder."""

    def __init__(
        self,
        folder: Path,
        *,
        volumes: Mapping[str, Path] | None = None,
        config_maps: ConfigMaps | None = None,
        processes: int | None = None,
        steps: int | None = None,
        job_class: str | Path | None = None,
    ) -> None:
        """Take the folder, which may not exist yet.

        Args:
            volumes: a folder for each claim's name; other claims get a folder in `folder`.
            processes: of each gang; None: as many as a job has on CPUs, else 1.
            steps: of each run; None: the spec's.
            job_class: file with GRPOJobClasses; None: those in a job's own file.

        Raises:
            OptionError: a volume's folder does not exist, or a file holds no ConfigMap.
        """
        self.folder = folder.resolve()
        self._volumes = {name: path.resolve() for name, path in (volumes or {}).items()}
        problems = [
            f"volume {name} is {path}, which is no folder; make it first"
            for name, path in self._volumes.items()
            if not path.is_dir()
        ]
        self._config_maps = config_maps or {}
        problems += config_map_problems(self._config_maps)
        if problems:
            raise OptionError(*problems)
        self._processes = processes
        self._steps = steps
        self._class_options = Namespace(job_class=job_class and str(job_class))
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def plan(self, job: Job) -> PlanResult:
        """Plan a job on this machine's CPUs."""
        return self._plan(self._spec_of(job))

    def create(self, job: Job) -> str:
        """Start a job's first attempt and return its name.

        Raises:
            OptionError: there is a run of its name, or it needs what only a cluster has.
            NotYet: it has no plan, or an init container fails.
        """
        require_trainer()
        job = with_own_name(job)
        name: str = job.metadata["name"]
        home = self.folder / name
        spec = self._spec_of(job)
        metadata = {**job.metadata, "namespace": NAMESPACE, "uid": str(uuid.uuid4())}
        result = self._plan(spec)
        if result.chosen is None:
            raise NotYet(f"{name}: {result.message}")
        _require_memory(spec.model.name, result.chosen.host_memory_bytes)
        attempt = build_attempt(metadata, spec, result.chosen, 1, self._resume_source(spec))
        pod = local_pod(attempt, self._config_maps, os.environ)
        try:
            home.mkdir(parents=True)
        except FileExistsError as error:
            raise OptionError(
                f"metadata.name is {name}, and {home} is there already; choose another name or "
                "folder, delete that run, or remove what is left of a start that failed"
            ) from error
        except OSError as error:
            raise OptionError(
                f"{home} can't be made: {error.strerror}; choose another folder"
            ) from error
        try:
            for container in pod.init_containers:
                self._run_init_container(home, container)
        except KeyboardInterrupt:
            shutil.rmtree(home)  # it is no run yet, so that nobody could delete it by its name
            raise
        write_whole(home / JOB_FILE, json.dumps(document_of(Job(metadata, spec)), indent=2))
        self._start(attempt, pod)
        return name

    def resume(self, name: str) -> None:
        """Start the next attempt of a run that was ended; it continues from its newest checkpoint.

        Raises:
            OptionError: it is still running, or has succeeded.
        """
        metadata, job = self.read_job(name)
        if job.status.phase in (Phase.STARTING, Phase.RUNNING, Phase.SUCCEEDED):
            raise OptionError(
                f"{name} is {job.status.phase}; only a suspended or failed run starts again"
            )
        status, source = job.status, self._resume_source(job.spec)
        assert status.plan is not None  # of the attempt before
        attempt = build_attempt(metadata, job.spec, status.plan, status.attempt + 1, source)
        pod = local_pod(attempt, self._config_maps, os.environ, has_mounts=True)
        self._start(attempt, pod)

    retry = resume

    def names(self) -> list[str]:
        """Names of all jobs of the folder."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{JOB_FILE}"))

    def read_job(self, name: str) -> LocalJob:
        """Return a job with its status as it is now.

        Raises:
            NotYet: no run has that name, its first attempt has not begun, or another version
                wrote it.
        """
        job_document = self._read_document(name)
        self._reap(name)
        try:
            spec = GRPOJobSpec.model_validate(job_document["spec"])
            status = read_status(self.folder / name)
        except ValidationError as error:
            raise NotYet(str(version_error(name, error))) from error
        except FileNotFoundError as error:
            raise _no_attempt(name) from error
        return LocalJob(job_document["metadata"], GRPOJob(spec=spec, status=status))

    def attempt_folder(self, name: str) -> Path:
        """Folder of the newest attempt's plan, log and outcome."""
        home = self.folder / name
        return home / f"{ATTEMPT_PREFIX}{newest_attempt(home)}"

    def run_folder(self, name: str) -> Path:
        """Folder of the run's checkpoints, history and exported model.

        Raises:
            NotYet: its first attempt has not begun.
        """
        try:
            plan_text = (self.attempt_folder(name) / PLAN_FILE).read_bytes()
        except FileNotFoundError as error:
            raise _no_attempt(name) from error
        plan = TrainingPlan.model_validate_json(plan_text)
        assert plan.checkpoint_directory is not None  # local_spec has seen to it
        return Path(plan.checkpoint_directory)

    def export_folder(self, name: str) -> Path:
        """Folder of the finished model.

        Raises:
            NotYet: the run has none, or there is no job of that name.
        """
        self._read_document(name)
        folder = self.run_folder(name) / EXPORT_FOLDER
        if not folder.is_dir():
            phase = self.read_job(name).job.status.phase
            raise NotYet(f"{name} is {phase} and has no exported model at {folder}")
        return folder

    def rows(self, name: str, file: str = METRICS_FILE) -> list[Row]:
        """Rows of a history file; none before the first step.

        Raises:
            NotYet: there is no job of that name.
        """
        self._read_document(name)
        folder = self.run_folder(name)
        has_file = any(folder.glob(f"{ATTEMPT_PREFIX}*/{file}"))
        return load_history(Namespace(), str(folder), file) if has_file else []

    def log_file(self, name: str) -> Path:
        """What the newest attempt printed."""
        return self.attempt_folder(name) / LOG_FILE

    def outcomes(self, name: str) -> list[tuple[float, Outcome]]:
        """How the attempts ended, each with the unix time, oldest first."""
        ended_attempts = []
        with contextlib.suppress(FileNotFoundError):  # another process deletes the run
            for file in (self.folder / name).glob(f"{ATTEMPT_PREFIX}*/{OUTCOME_FILE}"):
                time, outcome = file.stat().st_mtime, read_outcome(file.parent)
                ended_attempts += [(time, outcome)] if outcome else []
        return sorted(ended_attempts, key=lambda pair: pair[0])

    def suspend(self, name: str) -> None:
        """End the trainer, with SIGTERM, after which it saves a checkpoint; harmless where none
        runs.

        Raises:
            NotYet: there is no job of that name.
        """
        self._read_document(name)
        home = self.folder / name
        process_id = 0
        deadline = SYSTEM_CLOCK.now() + KILL_SECONDS
        while is_running_in(home) and SYSTEM_CLOCK.now() < deadline:
            # It is being started and has no file yet, or has ended since.
            with contextlib.suppress(OSError, ValueError):
                if not process_id:
                    process_id = read_process(self.attempt_folder(name))["pid"]
                    os.kill(process_id, signal.SIGTERM)
            SYSTEM_CLOCK.sleep(POLL_SECONDS)
        if process_id and is_running_in(home):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process_id, signal.SIGKILL)
            deadline = SYSTEM_CLOCK.now() + KILL_SECONDS
            while is_running_in(home) and SYSTEM_CLOCK.now() < deadline:
                SYSTEM_CLOCK.sleep(POLL_SECONDS)
        self._reap(name)

    def delete(self, name: str) -> None:
        """End the run and remove its folder; the volumes, with checkpoints and model, stay.

        Raises:
            NotYet: no run has that name, or its trainer does not end.
        """
        self.suspend(name)
        if is_running_in(self.folder / name):
            raise NotYet(f"the trainer of {name} does not end; end it, then delete the run")
        (self.folder / name / JOB_FILE).unlink()  # from here on nobody takes it for a run
        shutil.rmtree(self.folder / name)

    def _spec_of(self, job: Job) -> GRPOJobSpec:
        """The spec with the job's class, as it is planned here. What the class gives pods alone,
        such as mounts and devices, is left out."""
        job_class = class_of(self._class_options, job)
        spec = with_class(job.spec, job_class, job.metadata).on_platform(PlatformSpec())
        return local_spec(job.metadata["name"], spec, self._processes, self._steps)

    def _read_document(self, name: str) -> dict[str, Any]:
        # Another process may delete the run after its name was read.
        with contextlib.suppress(FileNotFoundError):
            if name in self.names():
                document: dict[str, Any] = json.loads((self.folder / name / JOB_FILE).read_bytes())
                return document
        there = ", ".join(self.names()) or "none"
        raise NotYet(f"no job {name!s:.80} in {self.folder}; there are: {there}")

    def _plan(self, spec: GRPOJobSpec) -> PlanResult:
        options = plan_inputs.planning_options()
        volume, folder = spec.model.volume, Path(spec.model.name)
        if volume and folder.is_relative_to(MODEL_MOUNT):
            source = self._claim_folder(ClaimFolder(volume.claim_name, volume.sub_path or ""))
            folder = source / folder.relative_to(MODEL_MOUNT)
        if (folder / "config.json").is_file():
            options.config = str(folder)
        return plan_inputs.make_plan(options, spec)

    def _resume_source(self, spec: GRPOJobSpec) -> ResumeSource | None:
        """Where the checkpoints of spec.resumeFrom.grpoJob are."""
        name = spec.resume_from.grpo_job if spec.resume_from else None
        if name is None:
            return None
        metadata, job = self.read_job(name)
        volume = checkpoint_volume(name, job.spec.checkpoint)
        assert volume is not None  # local_spec has seen to it
        return ResumeSource(
            grpo_job=name,
            uid=metadata["uid"],
            claim_name=volume.claim_name,
            sub_path=volume.sub_path,
            folder=run_folder(name, metadata["uid"]),
        )

    def _claim_folder(self, source: ClaimFolder) -> Path:
        folder = self._volumes.get(source.claim, self.folder / VOLUMES / source.claim)
        return folder / source.sub_path

    def _link_mounts(self, root: Path, mounts: Mapping[str, MountSource]) -> None:
        """Make the trainer's mounts below `root`, beside those of an attempt before."""
        for path, source in mounts.items():
            place = Path(f"{root}{path}")
            if isinstance(source, ClaimFolder) and not place.is_symlink():
                folder = self._claim_folder(source)
                folder.mkdir(parents=True, exist_ok=True)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(folder, target_is_directory=True)
            if isinstance(source, Mapping):
                # As in a pod, each attempt has the files that the ConfigMap has by then.
                if source:
                    shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True, exist_ok=True)
                for file, text in source.items():
                    (place / file).write_text(text, encoding="utf-8")

    def _run_init_container(self, home: Path, container: LocalContainer) -> None:
        """Run an init container to its end, with its mounts' paths replaced in its arguments."""
        folders = {
            path: self._claim_folder(source)
            for path, source in container.mounts.items()
            if isinstance(source, ClaimFolder)
        }
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        command = [_with_folder(word, folders) for word in container.command]
        log = home / f"{container.name}.log"
        with log.open("wb") as output:
            code = subprocess.call(
                command,
                env=_environment(container.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if code:
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise NotYet(
                f"the init container {container.name} ended with exit code {code}: {last_line}; "
                f"its log is {log}"
            )

    def _start(self, attempt: Attempt, pod: LocalPod) -> None:
        """Start the trainer of an attempt, unless another process does so."""
        home = self.folder / attempt.key.name
        folder = home / f"{ATTEMPT_PREFIX}{attempt.number}"
        elsewhere = NotYet(f"{attempt.key.name} is being started by another process")
        with (home / LOCK_FILE).open("w") as lock:
            try:
                take_lock(lock)
            except BlockingIOError as error:
                raise elsewhere from error
            if (folder / PLAN_FILE).exists():
                raise elsewhere
            # It is there already if an earlier start was cut off before it had a plan.
            folder.mkdir(exist_ok=True)
            self._start_in(folder, attempt, pod, lock)

    def _start_in(self, folder: Path, attempt: Attempt, pod: LocalPod, lock: IO[str]) -> None:
        """Start the trainer of an attempt in its folder; `lock` is the run's."""
        root = folder.parent / "mounts"
        self._link_mounts(root, pod.trainer.mounts)
        plan = local_plan(training_plan(attempt), pod.trainer.mounts, root, _free_port())
        if plan.checkpoint_directory:
            # On the volume, which stays when the run's own folder is deleted.
            lasting = str(Path(plan.checkpoint_directory).resolve())
            plan = plan.model_copy(update={"checkpoint_directory": lasting})
        port = _free_port()
        places = {
            PLAN_ENV: str(folder / PLAN_FILE),
            TERMINATION_LOG_ENV: str(folder / OUTCOME_FILE),
            PROGRESS_BIND_ENV: f"{LOCAL_ADDRESS}:{port}",
            **mount_variables(root),
            # A pod without GPUs sees none.
            "CUDA_VISIBLE_DEVICES": "",
        }
        with (folder / LOG_FILE).open("wb") as log, deferred_signals():
            # What has a plan is an attempt.
            write_whole(folder / PLAN_FILE, plan_json(plan))
            process = subprocess.Popen(
                pod.trainer.command,
                env=_environment(pod.trainer.environment | places),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The lock lives as long as the trainer, which inherits the open file.
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )
            self._children[attempt.key.name] = process
            write_whole(folder / PROCESS_FILE, json.dumps({"pid": process.pid, "port": port}))

    def _reap(self, name: str) -> None:
        """Take the exit code of a child that has ended, which would stay a zombie."""
        if child := self._children.get(name):
            child.poll()


def _no_attempt(name: str) -> NotYet:
    return NotYet(f"{name} has no attempt yet: it is being started, or was cut off")


def _require_memory(model: str, needed: int) -> None:
    """Refuse a plan that would make this machine swap."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise OptionError(
            f"spec.model.name is {model}, whose training on CPUs needs {format_bytes(needed)}; "
            f"this machine has {format_bytes(there)}: name a smaller model to try data and rewards"
        )


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with these variables, and with its modules."""
    modules = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": modules, **added}


def _with_folder(word: str, folders: Mapping[str, Path]) -> str:
    """An argument with a mount's path replaced by its folder."""
    for path, folder in folders.items():
        if word == path or word.startswith(f"{path}/"):
            return f"{folder}{word.removeprefix(path)}"
    return word


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOCAL_ADDRESS, 0))
        return int(probe.getsockname()[1])
