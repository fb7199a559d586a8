"""A job whose inputs are in a folder, for the tests of its preflight."""

import json
import re
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightProblem, PreflightReport
from tests.support.ranks import runs
from tests.trainer.hub import Files

ROWS = [{"prompt": f"say {number % 10}", "answer": str(number % 10)} for number in range(40)]
REWARD = """
def digits(completions, trainer_state, **_):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def raises(completions, **_):
    raise KeyError(completions[0])

def few(completions, **_):
    return [1.0]

def gpu(completions, **_):
    raise RuntimeError("Found no NVIDIA driver on your system")

def slow(completions, **_):
    __import__("time").sleep(60)
"""


class Job:
    """A job whose inputs are in a folder, without mistakes; `plan` changes parts of it."""

    def __init__(self, folder: Path, model: Files) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        for name, content in model.items():
            (self.model / name).write_bytes(content)
        (folder / "data").mkdir()
        lines = [json.dumps(row) for row in ROWS]
        (folder / "data" / "train.jsonl").write_text("\n".join(lines))
        (folder / "rewards" / "0").mkdir(parents=True)
        (folder / "rewards" / "0" / "mine.py").write_text(REWARD)

    def plan(self, **changes: Any) -> TrainingPlan:
        """The plan with these parts in place of its own."""
        parts = runs.plan(self.model, folder=self.folder / "run").model_dump() | {
            "dataset": {"files": {"configMap": {"name": "rows"}, "paths": ["train.jsonl"]}},
            "rewards": [python("mine:digits"), {"accuracy": {}}, {"format": {"pattern": "a"}}],
        }
        return TrainingPlan.model_validate(parts | changes)


def python(function: str) -> dict[str, Any]:
    """A reward of the ConfigMap."""
    return {"python": {"function": function, "configMap": {"name": "mine"}}}


def only_problem(report: PreflightReport) -> PreflightProblem:
    """The one problem, which is plain."""
    (problem,) = report.problems
    assert problem.path.startswith("spec.")
    assert not re.search(r"repr\(|Traceback|at 0x|<nil>|File \"", problem.message)
    return problem
