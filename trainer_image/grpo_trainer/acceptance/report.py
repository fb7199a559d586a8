"""Writes the report as one JSON file, one Markdown page and one log, and in a pod the Outcome for the operator.

There are only three files, because a borrowed machine may let its user copy only a few.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .findings import Finding, State
from .runner import Done

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


def write(folder: Path, where: Surroundings, done: Sequence[Done]) -> None:
    """Replace all three files. Each is whole at any time: the run may be killed while it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    log = "".join(f"==== {one.name}, {one.seconds} s\n{one.log}\n" for one in done if one.log)
    texts = {RESULT: json.dumps(as_json(where, done), indent=1) + "\n", PAGE: page(as_json(where, done)), LOG: log}
    for name, text in texts.items():
        unfinished = folder / f".{name}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / name)


def as_json(where: Surroundings, done: Sequence[Done]) -> dict[str, Any]:
    """The whole result without the logs."""
    checks = [
        {"check": one.name, "seconds": one.seconds, "findings": [asdict(finding) for finding in one.findings]}
        for one in done
    ]
    return asdict(where) | {"summary": summary(done), "checks": checks}


def page(result: dict[str, Any]) -> str:
    """The result, as read from its JSON, as Markdown: what differs from the image, and a row per finding."""
    different = [f"| {name} | {here} | {image} |" for name, (here, image) in sorted(result["different"].items())]
    versions = ["", "| package | here | image |", "|---|---|---|", *different] if different else []
    rows = [
        f"| {_cell(finding['what'])} | {finding['state']} | {_cell(_seen(finding))} |"
        for check in result["checks"]
        for finding in check["findings"]
    ]
    head = f"{result['summary']}. {result['machine']}, {_device(result)}; "
    head += "versions that are not the image's:" if different else "every version is the image's."
    return "\n".join([head, *versions, "", "| what | state | seen |", "|---|---|---|", *rows, ""])


def summary(done: Sequence[Done]) -> str:
    """How many findings ended how, in words."""
    states = [finding.state for one in done for finding in one.findings]
    return ", ".join(f"{states.count(state)} {state}" for state in State)


def failed(done: Sequence[Done]) -> list[Finding]:
    """The findings that say that something is wrong."""
    return [finding for one in done for finding in one.findings if finding.state is State.FAILED]


def _device(result: dict[str, Any]) -> str:
    """The GPU's name where the check of it has found one."""
    products = [
        str(finding["numbers"]["product"])
        for check in result["checks"]
        for finding in check["findings"]
        if "product" in finding["numbers"]
    ]
    return products[0] if products else str(result["device"])


def _seen(finding: dict[str, Any]) -> str:
    """The message; behind it numbers that it doesn't say itself, if they are few."""
    numbers = finding["numbers"]
    few = [f"{name} {_short(value)}" for name, value in numbers.items()] if 0 < len(numbers) <= 8 else []
    return "; ".join([str(finding["message"]), *([", ".join(few)] if few else [])])


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _cell(text: str) -> str:
    """Text that stays within its cell of a table."""
    return " ".join(text.replace("|", "/").split())
