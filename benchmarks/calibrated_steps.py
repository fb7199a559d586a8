"""Compares step times that a plan predicts with those that runs on this machine's CPUs then take.

The quickstart and a gang of two ranks run once, `grpo calibrate` collects their steps, and each
runs again with another batch and other lengths. In five minutes:

    python -m benchmarks calibrated_steps [--steps 12]

Prints predicted against measured seconds of sampling and training; exits 1 where one is not within
1.5 times.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import Phase
from grpo_cli.__main__ import main as grpo
from grpo_cli.inputs.calibration_file import read_calibration
from grpo_cli.inputs.manifest import Job, document_of, load_config_maps, load_specs, read_job
from grpo_cli.local.local_pod import local_spec
from grpo_cli.local.local_runs import LocalRuns
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from grpo_planner.replan.measured_step import StepSeconds
from tests.support.ranks import demo_model

LIMIT = 1.5
EXAMPLE = Path(__file__).parents[1] / "examples/quickstart.yaml"
POLL_SECONDS = 0.5
ENDED = (Phase.SUCCEEDED, Phase.FAILED)


class Case(NamedTuple):
    """A job, and the change after which it runs again."""

    job: Job
    processes: int
    change: dict[str, Any]

    @property
    def changed(self) -> Job:
        """The job that is predicted."""
        document = copy.deepcopy(document_of(self.job))
        document["metadata"]["name"] += "-again"
        document["spec"]["training"] |= self.change
        return read_job(document)


def main() -> int:
    """Run, calibrate, run again and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        return compare(Path(name), steps)


def compare(folder: Path, steps: int) -> int:
    """Print a row for each case; return the exit code."""
    file = folder / "calibration.yaml"
    worst = 1.0
    print("| job | ranks | predicted s | measured s | step s | x |\n|---|---|---|---|---|---|")
    for case in cases(folder):
        runs = LocalRuns(
            folder / case.job.metadata["name"], volumes={"files": folder, "quickstart": folder},
            config_maps=load_config_maps(str(EXAMPLE)), processes=case.processes, steps=steps,
        )  # fmt: skip
        run(runs, case.job)
        grpo(["calibrate", str(runs.folder), "--to", str(file)])
        predicted = prediction(case, file, steps)
        run(runs, case.changed)
        ratio = show(runs, case, predicted)
        worst = max(worst, ratio, 1 / ratio)
    print(f"the worst is {worst:.2f} times off, the limit {LIMIT}")
    return int(worst > LIMIT)


def cases(folder: Path) -> list[Case]:
    """The quickstart, and two ranks that train another tiny model on other prompts."""
    demo_model.save_policy(folder / "tiny")
    rows = [json.dumps({"prompt": f"say {number}"}) for number in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    quickstart = load_specs(str(EXAMPLE))[0]
    document = copy.deepcopy(document_of(quickstart))
    document["metadata"] = {"name": "gang"}
    document["spec"] |= {
        "model": {"name": "/models/tiny", "parameters": "84K", "volume": {"claimName": "files"}},
        "dataset": {"files": {"volume": {"claimName": "files"}, "paths": ["prompts.jsonl"]}},
        "rewards": [{"format": {"pattern": ".*[0-9].*"}}],
        "checkpoint": {"everySteps": 1000, "volume": {"claimName": "checkpoints"}},
    }
    document["spec"]["training"] |= {"numGenerations": 4, "maxCompletionLength": 24}
    document["spec"].pop("podTemplate")
    return [
        Case(quickstart, 1, {"promptsPerStep": 4, "maxCompletionLength": 64}),
        Case(read_job(document), 2, {"promptsPerStep": 16, "maxCompletionLength": 32}),
    ]


def run(runs: LocalRuns, job: Job) -> None:
    """Run a job to its end."""
    name = runs.create(job)
    while (phase := runs.read_job(name).job.status.phase) not in ENDED:
        time.sleep(POLL_SECONDS)
    if phase is not Phase.SUCCEEDED:
        raise SystemExit(f"{name} failed: see {runs.log_file(name).read_text()[-2000:]}")


def prediction(case: Case, file: Path, steps: int) -> ExecutionPlan:
    """The plan of the changed job with what was measured so far."""
    job = case.changed
    spec = local_spec(job.metadata["name"], job.spec, case.processes, steps)
    read_calibration.cache_clear()
    plan = plan_job(spec, Inventory(), measured=read_calibration(str(file))).chosen
    assert plan is not None, "it has just run"
    return plan


def show(runs: LocalRuns, case: Case, plan: ExecutionPlan) -> float:
    """Print one comparison; return predicted by measured."""
    name = case.changed.metadata["name"]
    rows = runs.rows(name)
    seconds = StepSeconds.of_history(rows)
    measured = seconds.generation + seconds.training
    predicted = plan.estimated_step_seconds
    assert predicted is not None, "a run was measured"
    step_times = sorted(row["step_time"] for row in rows)
    step = step_times[len(step_times) // 2]
    ratio = predicted / measured
    numbers = f"{predicted:.2f} | {measured:.2f} | {step:.2f} | {ratio:.2f}"
    print(f"| {name} | {case.processes} | {numbers} |")
    return ratio
