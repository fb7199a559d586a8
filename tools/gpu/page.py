"""docs/internals/gpu.md's last result, written from the results of acceptance runs on a GPU.

Nobody types a measured number. A borrowed machine may end a command before all checks are through,
so a result may come in parts. Measured memory is held against the predictions of today.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import ROOT, replace_section
from grpo_acceptance.findings import (
    CHECKS,
    Finding,
    State,
    cases,
    compare_with_prediction,
    load_findings,
    skipped_finding,
)
from grpo_acceptance.report import NEVER_BEGUN, Surroundings, as_json, markdown_page
from grpo_acceptance.runner import CheckResult

PAGE = ROOT / "docs/internals/gpu.md"
SECTION = "acceptance"
MEASURED = "measured "
"""Begin of the name of a phase's number."""


def publish(results: Sequence[Path], target: Path = PAGE) -> bool:
    """Put the results of one machine into the page; false, and nothing is written, if one isn't a
    GPU's."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    if any(part["device"] != "cuda" for part in parts):
        return False
    replace_section(target, SECTION, markdown_page(merged(parts)))
    return True


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several parts: of each check the last part that ran it."""
    ended: dict[str, CheckResult] = {}
    for part in parts:
        for check in part["checks"]:
            findings = load_findings(json.dumps(check["findings"]))
            has_run = any(finding.state is not State.NOT_RUN for finding in findings)
            if has_run or check["check"] not in ended:
                judged = [judge_again(check["check"], finding) for finding in findings]
                ended[check["check"]] = CheckResult(check["check"], judged, check["seconds"])
    unfinished = {
        check.name: CheckResult(check.name, [skipped_finding(check.name, NEVER_BEGUN)])
        for check in CHECKS
    }
    last = parts[-1]
    where = Surroundings(*(last[name] for name in ("machine", "device", "versions", "different")))
    return as_json(where, [ended.get(check.name, unfinished[check.name]) for check in CHECKS])


def judge_again(check: str, finding: Finding) -> Finding:
    """A finding of measured memory beside the prediction of today; any other as it is."""
    phases = {
        name.removeprefix(MEASURED): int(value)
        for name, value in finding.numbers.items()
        if name.startswith(MEASURED)
    }
    if not phases:
        return finding
    case = cases()[int(check.rpartition("-")[2]) - 1]
    return compare_with_prediction(case, phases, int(finding.numbers["device"]))
