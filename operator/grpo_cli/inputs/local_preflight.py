"""The trainer's own checks of a job, in a process on this machine: the command line loads no
training library."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport
from grpo_api.text.contract import PLAN_ENV, TERMINATION_LOG_ENV
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt, plan_json, training_plan
from grpo_operator.pods.preflight_job import CPU_PLAN

from ..show.errors import NotYet, OptionError

NEEDED = ("grpo_trainer", "transformers", "datasets")
"""Packages of the trainer without which nothing can be checked here."""


class LocalPreflight(NamedTuple):
    """What the checks found."""

    report: PreflightReport
    prompt: str
    """What the model reads of the first row; empty where it could not be rendered."""


def require_trainer(instead: str = "") -> None:
    """Make sure that the trainer's packages are here; `instead`: what else the user may do.

    Raises:
        OptionError: one is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return
    install = "install the trainer's packages by `pip install 'grpo-operator[trainer]'`"
    fix = f"{install}, or {instead}" if instead else install
    raise OptionError(f"not installed here: {', '.join(missing)}; {fix}")


def check_here(
    name: str, namespace: str | None, spec: GRPOJobSpec, *, only_prompt: bool = False
) -> LocalPreflight:
    """Check a job, or with `only_prompt` its model and the first row of its dataset.

    Raises:
        NotYet: the process left no report; what it printed is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        plan_file, report_file, prompt_file = (
            Path(folder, name) for name in ("plan.json", "report.json", "prompt.txt")
        )
        plan_file.write_text(plan_json(local_plan(name, namespace, spec)), encoding="utf-8")
        environment = os.environ | {
            PLAN_ENV: str(plan_file),
            TERMINATION_LOG_ENV: str(report_file),
        }
        command = [sys.executable, "-m", "grpo_trainer.preflight", "--local"]
        command += ["--prompt", str(prompt_file), *(["--only-prompt"] if only_prompt else [])]
        # Its progress and its log are no part of what a command prints.
        completed_process = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        try:
            report = PreflightReport.model_validate_json(report_file.read_bytes())
        except (OSError, ValidationError) as error:
            sys.stderr.write(completed_process.stdout.decode(errors="replace"))
            raise NotYet(
                f"the checks ended with exit code {completed_process.returncode} and no report"
            ) from error
        prompt = prompt_file.read_text(encoding="utf-8") if prompt_file.exists() else ""
        return LocalPreflight(report, prompt)


def local_plan(name: str, namespace: str | None, spec: GRPOJobSpec) -> TrainingPlan:
    """What a pod of the job's first attempt would be given, but for what only the planner says."""
    key = ObjectKey(namespace or "default", name)
    return training_plan(Attempt(key=key, uid="preflight", spec=spec, plan=CPU_PLAN, number=1))
