"""`grpo usage`: what became of the GPUs' time of one job, of a namespace's or of all, and what it
cost.

The states are those of docs/explanation/usage.md. Jobs on CPUs hold no GPUs and are left out.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from grpo_api.status.usage import GPUSeconds, Usage
from grpo_api.text.messages import printable_text
from grpo_api.text.timing import HOUR

from ..cluster import kubectl
from ..show.documents import add_output, print_document
from ..show.errors import KubectlError, NotYet, OptionError
from ..show.terminal import console, show_table

HEADINGS = ("job", "GPU-h", "effective", "lost", "other", "queued", "cost")
TOTAL = "all"
UNKNOWN = "-"


class Row(NamedTuple):
    """One job, or the sum of all."""

    name: str
    usage: Usage


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", nargs="?", help="name of the GRPOJob; unset: all of the namespace")
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="those of all namespaces"
    )
    add_output(parser)
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Prints the jobs and their sum."""
    if options.name and options.all_namespaces:
        raise OptionError(
            f"--all-namespaces shows all jobs: leave {options.name} out, or name its namespace "
            "with -n"
        )
    items = kubectl.get_jobs(options, [options.name] if options.name else [])
    rows = list(_rows(options, items))
    if options.output != "table":
        document = {"items": [_as_json(row) for row in rows], "total": _as_json(total(rows))}
        print_document(options.output, document)
        return 0
    if not rows:
        raise NotYet(
            "no GRPOJob here has a status.usage: none has GPUs, or the operator has not looked at "
            "it yet"
        )
    shown = rows if len(rows) == 1 else [*rows, total(rows)]
    show_table(console(), HEADINGS, shown, _cells, right=HEADINGS[1:])
    if len(rows) == 1:
        console().print(rows[0].usage.description)
    return 0


def total(rows: Sequence[Row]) -> Row:
    """The sum of all jobs; its cost is that of jobs that have one."""
    spent = GPUSeconds()
    for row in rows:
        spent = spent.plus(row.usage.gpu_seconds)
    costs = [row.usage.cost for row in rows if row.usage.cost is not None]
    as_of = max((row.usage.as_of for row in rows), default="1970-01-01T00:00:00Z")
    cost = round(sum(costs), 4) if costs else None
    usage = Usage(
        as_of=as_of,
        gpu_seconds=spent,
        held_gpu_seconds=round(spent.total, 3),
        effective=spent.effective_share,
        cost=cost,
        queued_seconds=sum(row.usage.queued_seconds for row in rows),
    )
    return Row(TOTAL, usage)


def _rows(options: Namespace, items: Iterable[dict[str, Any]]) -> Iterable[Row]:
    """The jobs that have a usage. One that can't be read is an error where it is asked for by its
    name, and hides no other."""
    for item in items:
        meta, usage = item["metadata"], (item.get("status") or {}).get("usage")
        if not usage:
            continue
        name = f"{meta['namespace']}/{meta['name']}" if options.all_namespaces else meta["name"]
        try:
            yield Row(name, _usage(name, usage))
        except KubectlError as error:
            if options.name:
                raise
            print(f"grpo: left out: {printable_text(str(error))}", file=sys.stderr)


def _usage(name: str, document: object) -> Usage:
    """The usage in a job's status, or the error that another version wrote it."""
    try:
        return Usage.model_validate(document, extra="ignore")
    except ValidationError as error:
        raise kubectl.version_error(name, error, "status.usage.") from error


def _cells(row: Row) -> list[str]:
    usage, spent = row.usage, row.usage.gpu_seconds
    durations = (usage.held_gpu_seconds, spent.lost, spent.other, usage.queued_seconds)
    held_hours, lost_hours, other_hours, queued_hours = (
        f"{seconds / HOUR:.1f}" for seconds in durations
    )
    cost = UNKNOWN if usage.cost is None else f"{usage.cost:.2f}"
    return [
        row.name,
        held_hours,
        usage.effective or UNKNOWN,
        lost_hours,
        other_hours,
        queued_hours,
        cost,
    ]


def _as_json(row: Row) -> dict[str, Any]:
    usage = row.usage.model_dump(mode="json", exclude_none=True, exclude={"attempts", "earlier"})
    return {"name": row.name, **usage}
