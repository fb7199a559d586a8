"""`grpo plan`: will it fit, on what, how, why not otherwise, and what would each change cost; no cluster needed.

The planner's own face. Exit codes: 0 planned, 2 the job or the inventory is wrong, 3 nothing fits (the table and the
cheapest changes are still printed).
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_planner.result.result import PlanReason, PlanResult

from . import picture, plan_table, size_table, sources, wanted, what_if
from .errors import WRONG, NotYet, OptionError
from .terminal import console

PLANNED, NOTHING_FITS = 0, 3
SPEC_IS_WRONG = (
    PlanReason.INVALID_BATCH_SPLIT, PlanReason.INVALID_COMBINATION, PlanReason.UNKNOWN_MODEL,
    PlanReason.UNSUPPORTED_MODEL,
)  # fmt: skip


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    wanted.add_arguments(parser)
    sources.add_arguments(parser)
    parser.add_argument(
        "-o", "--output", choices=["table", "json", "yaml", "svg", "png"], default="table",
        help="json follows docs/plan-schema.json; svg and png draw memory per phase",
    )  # fmt: skip
    parser.add_argument(
        "--what-if", metavar="KEY=VALUE", action="append", default=[],
        help="plan again with a field changed, such as numGenerations=16, and show the difference",
    )  # fmt: skip
    parser.add_argument("--sizes", action="store_true", help="print what every number of GPUs would give")
    parser.add_argument("--all", action="store_true", help="print every candidate of the table, not the first twelve")
    parser.add_argument("--to", metavar="FILE", help="write the picture here; unset: <job>.png, or svg to the terminal")
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Plans every job that is asked for; the exit code is the worst of them."""
    return max(_one(options, job) for job in wanted.wanted(options))


def _one(options: Namespace, job: wanted.Wanted) -> int:
    """Plans and prints one job."""
    name, spec = job.name, job.spec
    learned = None if options.model else sources.learned(options, name, job.namespace)
    result = sources.planned(options, spec, learned)
    if options.output in ("svg", "png"):
        _draw(options, name, result)
    elif options.output == "json":
        print(result.model_dump_json(indent=2))
    elif options.output == "yaml":
        print(yaml.safe_dump(result.model_dump(mode="json"), sort_keys=False, width=120), end="")
    else:
        plan_table.show(console(), name, result, everything=options.all)
        if result.chosen and not options.model:
            plan_table.show_export(console(), name, spec, result.chosen)
            plan_table.show_staged(console(), spec)
        plan_table.show_learned(console(), learned)
    if options.sizes:
        _sizes(options, spec, learned, result)
    code = exit_code(result)
    for change in options.what_if:
        code = max(code, _what_if(options, job, learned, result, change))
    return code


def _what_if(options: Namespace, job: wanted.Wanted, learned: Learned | None, result: PlanResult, change: str) -> int:
    """Plans the changed job and prints the difference.

    Raises:
        OptionError: the output is not the table, the only format that shows a difference.
    """
    if options.output != "table":
        raise OptionError("--what-if is shown as a table; leave out -o")
    changed_spec = what_if.changed(job.spec, change)
    changed = sources.planned(options, changed_spec, learned)
    left_out = what_if.left_out(job.spec, changed_spec)
    plan_table.difference(console(), change, result, changed, left_out)
    return exit_code(changed)


def _sizes(options: Namespace, spec: GRPOJobSpec, learned: Learned | None, result: PlanResult) -> None:
    """Prints the curve of GPUs against time, where there is one.

    Raises:
        OptionError: the output is not the table, or the job takes no GPUs.
    """
    if options.output != "table":
        raise OptionError("--sizes is shown as a table; leave out -o")
    if spec.placement.accelerator == "CPU":
        raise OptionError("--sizes compares numbers of GPUs, and spec.placement.accelerator is CPU")
    if result.reason not in SPEC_IS_WRONG:
        size_table.show(console(), sources.curve(options, spec, learned))


def exit_code(result: PlanResult) -> int:
    """0 planned, 2 the spec is wrong, 3 nothing fits."""
    if result.feasible:
        return PLANNED
    return WRONG if result.reason in SPEC_IS_WRONG else NOTHING_FITS


def _draw(options: Namespace, name: str, result: PlanResult) -> None:
    """Writes the picture of the chosen plan, or of the nearest candidate.

    Raises:
        NotYet: there is neither.
        OptionError: the file can't be written.
    """
    plan = result.chosen
    if plan is None and result.candidates:
        plan = result.candidates[0]
    if plan is None:
        raise NotYet(f"{name}: {result.message}")
    try:
        if options.output == "png":
            path = Path(options.to or f"{name.replace('/', '-')}.png")
            picture.png(plan, path)
            print(path, file=sys.stderr)
        elif options.to:
            Path(options.to).write_text(picture.svg(plan), encoding="utf-8")
        else:
            print(picture.svg(plan), end="")
    except OSError as error:
        raise OptionError(f"the picture can't be written: {error}") from error
