"""The report of a run: one JSON file, one Markdown page and one log, with this machine's versions.

There are only three files, because a borrowed machine may let its user copy only a few. They are
whole at any time. In a pod there is also the Outcome for the operator.

Versions are compared with the image's, with Python's standard library alone: a missing or different
version must be reported before an import fails on it.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_trainer.runtime.clock import SYSTEM_CLOCK

from .findings import Check, State, skipped_finding
from .runner import CheckResult

RESULT, PAGE, LOG = "result.json", "result.md", "log.txt"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the run took place."""

    machine: str
    """Python and system."""
    device: str
    """cuda or cpu."""
    versions: dict[str, str]
    """This machine's, by package."""
    different: dict[str, tuple[str, str]]
    """This machine's version and the image's, where these are not the same."""


def write_report(folder: Path, where: Surroundings, results: Sequence[CheckResult]) -> None:
    """Replace all three files. Each is whole at any time: the run may be killed while it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    log = "".join(
        f"==== {result.name}, {result.seconds} s\n{result.log}\n"
        for result in results
        if result.log
    )
    texts = {
        RESULT: json.dumps(as_json(where, results), indent=1) + "\n",
        PAGE: markdown_page(as_json(where, results)),
        LOG: log,
    }
    for name, text in texts.items():
        unfinished = folder / f".{name}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / name)


def as_json(where: Surroundings, results: Sequence[CheckResult]) -> dict[str, Any]:
    """The whole result without the logs."""
    checks = [
        {
            "check": result.name,
            "seconds": result.seconds,
            "findings": [asdict(finding) for finding in result.findings],
        }
        for result in results
    ]
    return asdict(where) | {"summary": summary(results), "checks": checks}


def markdown_page(result: dict[str, Any]) -> str:
    """The result, as read from its JSON, as Markdown: what differs from the image, and a row per
    finding."""
    different = [
        f"| {name} | {here} | {image} |"
        for name, (here, image) in sorted(result["different"].items())
    ]
    versions = ["", "| package | here | image |", "|---|---|---|", *different] if different else []
    rows = [
        f"| {_cell(finding['what'])} | {finding['state']} | {_cell(_finding_text(finding))} |"
        for check in result["checks"]
        for finding in check["findings"]
    ]
    head = f"{result['summary']}. {result['machine']}, {_device(result)}; "
    head += "versions that are not the image's:" if different else "every version is the image's."
    return "\n".join([head, *versions, "", "| what | state | seen |", "|---|---|---|", *rows, ""])


def summary(results: Sequence[CheckResult]) -> str:
    """How many findings ended how, in words."""
    states = [finding.state for result in results for finding in result.findings]
    return ", ".join(f"{states.count(state)} {state}" for state in State)


def _device(result: dict[str, Any]) -> str:
    """The GPU's name where the check of it has found one."""
    products = [
        str(finding["numbers"]["product"])
        for check in result["checks"]
        for finding in check["findings"]
        if "product" in finding["numbers"]
    ]
    return products[0] if products else str(result["device"])


def _finding_text(finding: dict[str, Any]) -> str:
    """The message; behind it numbers that it doesn't say itself, if they are few."""
    numbers, message = finding["numbers"], str(finding["message"])
    if not 0 < len(numbers) <= 8:
        return message
    shown = ", ".join(f"{name} {_short(value)}" for name, value in numbers.items())
    return f"{message}; {shown}"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _cell(text: str) -> str:
    """Text that stays within its cell of a table."""
    return " ".join(text.replace("|", "/").split())


PINS = Path(__file__).with_name("pins.json")
"""Versions of the image by package, generated from constraints.txt."""
MISSING = "missing"


def image_versions() -> dict[str, str]:
    """The image's versions."""
    versions: dict[str, str] = json.loads(PINS.read_text(encoding="utf-8"))
    return versions


def installed_versions(names: Any) -> dict[str, str]:
    """This machine's versions of the packages; MISSING for those that aren't there."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = MISSING
    return versions


def differing_versions(here: dict[str, str], image: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Packages whose version differs: this machine's and the image's. A local part such as +cu130
    is no difference."""
    return {
        name: (here[name], wanted)
        for name, wanted in image.items()
        if here[name].partition("+")[0] != wanted
    }


def versions_sentence(different: dict[str, tuple[str, str]]) -> str:
    """What differs, in words."""
    if not different:
        return "every version is the image's"
    return "other than the image: " + ", ".join(
        f"{name} {here} (image {wanted})" for name, (here, wanted) in sorted(different.items())
    )


def system_sentence() -> str:
    """Python and system, in words."""
    return f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"


NEVER_BEGUN = "the run ended before it"
CUT_OFF = "the run ended during it"


class Progress:
    """What has ended so far. The files name every check at any time, so a run that is killed leaves
    a whole report."""

    def __init__(
        self, checks: Sequence[Check], where: Surroundings, folder: Path, deadline: float
    ) -> None:
        self.results: list[CheckResult] = []
        self._names = [check.name for check in checks]
        self._where, self._folder, self._deadline = where, folder, deadline

    def begin(self, check: Check, seconds: float) -> None:
        """Say that a check begins, and for how many seconds at most."""
        seconds_left = self._deadline - SYSTEM_CLOCK.now()
        limit = f"at most {seconds:.0f} s of {seconds_left:.0f} s"
        print(f"begins   {check.name}, for {limit}", flush=True)
        self._write(running=check.name)

    def end(self, result: CheckResult) -> None:
        """Say what a check found."""
        self.results.append(result)
        for finding in result.findings:
            text = f"{finding.what}: {finding.message} ({result.seconds} s)"
            print(f"{finding.state:8} {text}", flush=True)
        self._write()

    def _write(self, running: str = "") -> None:
        results = list(self.results)
        ended = {result.name for result in results}
        for name in self._names:
            if name not in ended:
                why = CUT_OFF if name == running else NEVER_BEGUN
                results.append(CheckResult(name, [skipped_finding(name, why)]))
        write_report(self._folder, self._where, results)
