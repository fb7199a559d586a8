"""The example jobs, parsed, and rows in GSM8K's format to run them on.

The real rows are taken where they are at hand (GSM8K_SAMPLE, or shared/data beside the repository);
they are not part of it.
"""

import os
from pathlib import Path
from typing import Any

from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_cli.inputs.manifest import load_jobs
from grpo_cli.show.kubectl_yaml import load_documents

REPOSITORY = Path(__file__).parents[2]
OWN_ROWS = Path(__file__).parent / "data" / "gsm8k-format.jsonl"
REAL_ROWS = Path(
    os.environ.get("GSM8K_SAMPLE", REPOSITORY.parent / "shared" / "data" / "gsm8k-sample.jsonl")
)
ROWS = [path for path in (OWN_ROWS, REAL_ROWS) if path.is_file()]
"""Files to test with; the last is the most real."""


def example(name: str) -> tuple[GRPOJobSpec, list[dict[str, Any]]]:
    """An example's spec, and all its objects."""
    path = REPOSITORY / "examples" / name
    (job,) = load_jobs(str(path))
    return parse_spec(job["spec"]), load_documents(path.read_text())
