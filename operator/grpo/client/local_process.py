"""Jobs as processes of this machine, without a cluster: for data, rewards and small models."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_api.report.report import Result
from grpo_api.status.status import Phase
from grpo_api.text.messages import shorten
from grpo_cli.cluster.clock import SYSTEM_CLOCK
from grpo_cli.local.local_runs import LocalRuns
from grpo_cli.show.errors import OptionError
from grpo_kube.objects.times import timestamp

from .job import Event, Job, job_of, readable_jobs

POLL_SECONDS = 0.2


class LocalProcess(LocalRuns):
    """The trainer of each job as processes of this machine, on its CPUs; needs the trainer's
    packages."""

    def __init__(
        self,
        folder: str | Path = "grpo-runs",
        *,
        processes: int | None = None,
        volumes: Mapping[str, str | Path] | None = None,
        config_maps: Mapping[str, Mapping[str, str]] | None = None,
        job_class: str | Path | None = None,
    ) -> None:
        """Take what a cluster would have.

        Args:
            folder: of the runs.
            processes: of a job's gang; None: as many as it has on CPUs, else 1.
            volumes: a folder for the name of each claim; other claims get a new folder.
            config_maps: the files of each ConfigMap, by its name.
            job_class: file with GRPOJobClasses, for jobs that name one, or with a default one.
        """
        folders = {name: Path(path) for name, path in (volumes or {}).items()}
        super().__init__(
            Path(folder),
            volumes=folders,
            config_maps=config_maps,
            processes=processes,
            job_class=job_class,
        )

    def jobs(self) -> list[Job]:
        """All jobs of the folder that can be read."""
        return readable_jobs(self.names(), self.read_job)

    def job(self, name: str) -> Job:
        """The job, by its trainer's report or outcome."""
        return job_of(*self.read_job(name))

    def log_lines(self, name: str, rank: int, *, follow: bool) -> Iterator[str]:
        """The log of the gang, whose processes share it."""
        del rank
        self.job(name)
        try:
            log_file = self.log_file(name).open(errors="replace")
        except FileNotFoundError:
            self.job(name)  # says so if it has been deleted since
            raise
        with log_file as log:
            while True:
                # Asked before the log is read, whose last lines are there when it has ended.
                is_running = self.job(name).phase in (Phase.STARTING, Phase.RUNNING)
                for line in log:
                    yield line.rstrip("\n")
                if not (follow and is_running):
                    return
                SYSTEM_CLOCK.sleep(POLL_SECONDS)

    def events(self, name: str) -> list[Event]:
        """How the attempts ended."""
        self.job(name)
        return [
            Event(
                "Normal" if outcome.result is Result.SUCCEEDED else "Warning",
                outcome.result,
                outcome.message,
                timestamp(time),
            )
            for time, outcome in self.outcomes(name)
        ]

    def export(self, name: str, folder: Path) -> None:
        """Copy the model."""
        source = self.export_folder(name)
        try:
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise OptionError(f"{folder} is there already and not empty; name a new folder")
            shutil.copytree(source, folder, dirs_exist_ok=True)
        except OSError as error:
            why = shorten(error.strerror or str(error), 120)
            raise OptionError(f"the model can't be copied to {folder}: {why}") from error
