"""The recorded files: what the product gives for about 60 cases, in `recorded/`, one file per case.

They are the net under moves and rewrites that must not change behaviour.
`tests/unit/test_golden.py` renders every case again; after an intended change, `python -m
tests.golden` rewrites the files, and the commit shows the difference.

    examples/, jobs/ `grpo plan`, the objects of the first attempt and the training plan that its
    pods are given.
                       All but `jobs/base` show the difference to `jobs/base` (layout.unlike).
    objects/ the objects of given plans: later attempts, engines, Workloads, Jobs of the command
    line,
                       what a namespace's jobs share
    status/ per observation: decision, the queue's answer, the write to the status, the event, what
    is
                       cleared up, the write to the Workload
    refusals/          what is said of bad specs and bad arguments
    screens            `grpo status`, and what the operator's /metrics says of jobs
    story              the usage and the traces of a generated job

Not recorded again, since `make lint` compares these files with their sources (`grpo_codegen
--check`): the CRDs; alert and recording rules; dashboards; the tables of metrics (name, kind, unit,
labels, help), spans, API fields, chart values, GPU products and plans
(docs/internals/planner-table.md); the schema of `grpo plan -o json`; pins and predictions of the
acceptance run.

The trainer's digits are tests: tests/trainer/test_resume_exact.py compares a run with bare TRL and
with its own resumed runs, tests/trainer/test_reference_gang.py ranks with one process,
tests/trainer/test_order.py the prompts with TRL's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.golden import attempts, jobs, queues
from tests.golden.layout import text

FOLDER = Path(__file__).parent / "recorded"
COMMAND = "python -m tests.golden"
CASES: dict[str, Callable[[], Any]] = {**jobs.cases(), **attempts.cases(), **queues.cases()}
"""What renders each case, by the path of its file without the suffix."""


def path_of(case: str) -> Path:
    """Return the case's file."""
    return FOLDER / f"{case}.json"


def rendered(case: str) -> str:
    """Return what the file must hold."""
    return text(CASES[case]())


def recorded() -> set[Path]:
    """Return all files that there are."""
    return {path for path in FOLDER.rglob("*") if path.is_file()}


def write() -> list[Path]:
    """Rewrite the files that differ, delete those of no case, and return both."""
    stale = recorded() - {path_of(case) for case in CASES}
    for path in stale:
        path.unlink()
    return sorted(stale) + [path_of(case) for case in sorted(CASES) if _write(case)]


def _write(case: str) -> bool:
    """Write the case's file; return False where it is as it must be."""
    path, wanted = path_of(case), rendered(case)
    if path.exists() and path.read_text(encoding="utf-8") == wanted:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(wanted, encoding="utf-8")
    return True
