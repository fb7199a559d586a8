"""`python -m grpo_trainer.prefetch`: fetches what a plan's job will need of the hub, and trains
nothing.

A job that fetches its model holds its GPUs meanwhile; a pod without any can fill the cache before.
It is the job's own code that fetches, so that nothing is left to fetch. It fetches the same files
of the same commits, under the same leases, with the same tokens and the same patience. Begun again,
it goes on with what is missing.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.spec.model import ModelSpec
from grpo_api.spec.rewards import RewardSpec
from grpo_api.text.clock import Clock

from .hub.repositories import Hub, Repository
from .process.outcome import announce_outcome
from .process.process_setup import hide_unused_libraries
from .runtime.clock import SYSTEM_CLOCK
from .runtime.errors import classify_error
from .runtime.logs import configure_logs
from .runtime.plan_file import read_plan

log = logging.getLogger("grpo_trainer")

REPORT_SECONDS = 5.0
"""Least time between two lines of progress."""


class Progress:
    """Prints the progress of the downloads, one repository after the other."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        """No download has begun."""
        self._clock, self._what, self._last = clock, "", float("-inf")

    def begin_repository(self, what: str) -> None:
        """Count later bytes for this repository."""
        self._what = what

    def report_byte_count(self, count: int) -> None:
        """Print that `count` bytes of the repository are in the cache, at most every
        REPORT_SECONDS."""
        now = self._clock.now()
        if now - self._last >= REPORT_SECONDS:
            self._last = now
            log.info(f"{self._what}: {count / 1e6:.1f} MB in the cache")


def fetch_inputs(plan: TrainingPlan, clock: Clock = SYSTEM_CLOCK) -> Outcome:
    """Fetches the plan's models and its dataset, those that are not folders; says what was fetched
    and its commits.

    Raises:
        BadInput: there is no such repository or revision, no right to it, or it can't be used.
        Transient: the hub can't be asked now, or there is no room.
    """
    hide_unused_libraries(plan.execution)
    from .data.row_sources import read_hub
    from .weights.model_files import locate_model

    progress = Progress(clock)
    hub = Hub(plan.revisions, progress.report_byte_count, clock=clock)
    models = _models(plan.model, plan.rewards)
    for repository in models:
        progress.begin_repository(repository.description)
        locate_model(repository, plan.execution.dtype, hub)
        commit = hub.commits.get(repository.path, "unknown")
        log.info(f"{repository.description}: complete, commit {commit}")
    dataset, names = plan.dataset, [repository.name for repository in models]
    if dataset.name and not dataset.name.startswith("/"):
        progress.begin_repository(f"spec.dataset.name: {dataset.name}")
        rows, _ = read_hub(dataset, hub)
        log.info(f"spec.dataset.name: {dataset.name}: complete, {len(rows)} rows")
        names.append(dataset.name)
    outcome = Outcome(result=Result.SUCCEEDED, revisions=hub.commits)
    return truncate_to_fit(outcome, f"in the cache: {', '.join(names) or 'nothing to fetch'}")


def _models(model: ModelSpec, rewards: Sequence[RewardSpec]) -> list[Repository]:
    """The repositories of all models; a folder is there already."""
    repositories = [Repository("model", model.name, model.revision, "model")]
    for position, reward in enumerate(rewards):
        if judge := reward.model:
            path = f"rewards[{position}].model"
            repositories.append(Repository("model", judge.name, judge.revision, path))
    return [repository for repository in repositories if not repository.name.startswith("/")]


def main() -> int:
    """Fetches what the pod's plan names; returns the exit code."""
    # the first process of a container isn't ended by SIGTERM unless it says so
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODES[Result.PREEMPTED]))
    configure_logs()
    try:
        outcome = fetch_inputs(read_plan())
    except Exception as error:
        result, message = classify_error(error)
        outcome = truncate_to_fit(Outcome(result=result), message)
    return announce_outcome(outcome)


if __name__ == "__main__":
    sys.exit(main())
