"""`grpo plan`: shows whether a job fits, on which GPUs and with which settings, without a cluster.

It also shows why other options were rejected, and what each change would cost. Exit codes: 0
planned, 2 the job or the inventory is wrong, 3 nothing fits. With exit code 3, the table and the
cheapest changes are still printed.

The jobs to plan come from a file. To ask whether a model trains on given GPUs before any job is
written, users name the model alone.

`--what-if KEY=VALUE` plans a changed spec. KEY may be short, so that users type `numGenerations=16`
instead of a path.
"""

from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.other_names import other_name_hint
from grpo_planner.explain.fixes import with_value
from grpo_planner.model.catalogue import meant_name
from grpo_planner.result.result import SPEC_ERRORS, PlanResult

from ..inputs import job_classes, plan_inputs
from ..inputs.manifest import Job, add_filename, load_specs
from ..show import plan_table
from ..show.documents import print_document
from ..show.errors import WRONG, OptionError
from ..show.kubectl_yaml import load_value
from ..show.terminal import console

if TYPE_CHECKING:
    from grpo_api.status.status import AppliedJobClass

_FIELDS = {
    "parameters": ("model", "parameters"),
    "prompt_length": ("training", "maxPromptLength"),
    "completion_length": ("training", "maxCompletionLength"),
    "steps": ("training", "maxSteps"),
}
"""Options that describe a job without a file, by the section and the field that they set."""


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments that say which job."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "model",
        nargs="?",
        help="plan this model without a job file, such as Qwen/Qwen2.5-7B-Instruct",
    )
    add_filename(source)
    parser.add_argument(
        "--parameters",
        metavar="SIZE",
        help="with MODEL: its size, where the planner doesn't know it",
    )
    parser.add_argument(
        "--prompt-length", type=int, metavar="TOKENS", help="with MODEL: longest prompt. Unset: 512"
    )
    parser.add_argument(
        "--completion-length",
        type=int,
        metavar="TOKENS",
        help="with MODEL: longest completion. Unset: 512",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="with MODEL: optimizer steps of the run, for --sizes"
    )


def requested_jobs(options: Namespace) -> list[Job]:
    """The jobs that the options name; one of a model alone has its name.

    Raises:
        ManifestError: the file can't be read, or a job in it is wrong.
        OptionError: an option means nothing here, or its value is not allowed.
    """
    model_options = {
        name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None
    }
    if options.model is not None:
        if options.model.endswith((".yaml", ".yml", ".json")):
            raise OptionError(
                f"{options.model} is the name of a file: write `grpo plan -f {options.model}`"
            )
        name_meant = meant_name(options.model)
        # Something else may say what the model is.
        if name_meant and not (options.parameters or options.config or options.fetch_config):
            raise OptionError(
                f"{options.model}: did you mean {name_meant}? A model of your own takes "
                "--parameters SIZE, --config PATH or --fetch-config"
            )
        return [Job({"name": options.model}, _of_model(options.model, model_options))]
    if model_options:
        option, (section, field) = next(iter(model_options)), _FIELDS[next(iter(model_options))]
        raise OptionError(
            f"--{option.replace('_', '-')} goes with a model's name: the file says "
            f"spec.{section}.{field}; to compare, add --what-if {field}={model_options[option]}"
        )
    return load_specs(options.filename)


def _of_model(model: str, model_options: dict[str, Any]) -> GRPOJobSpec:
    """A job with defaults. Neither its dataset nor its reward counts in a plan."""
    document: dict[str, Any] = {
        "model": {"name": model},
        "dataset": {"name": "any"},
        "rewards": [{"accuracy": {}}],
    }
    for name, value in model_options.items():
        section, field = _FIELDS[name]
        document.setdefault(section, {})[field] = value
    try:
        return parse_spec(document)
    except SpecInvalid as error:
        raise OptionError(*error.problems) from error


PLANNED, NOTHING_FITS = 0, 3


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_arguments(parser)
    plan_inputs.add_arguments(parser)
    job_classes.add_argument(parser)
    parser.add_argument(
        "-o", "--output", choices=["table", "json", "yaml"], default="table",
        help="a plan as in docs/reference/plan-schema.json, under `items` where there are several",
    )  # fmt: skip
    parser.add_argument(
        "--what-if", metavar="KEY=VALUE", action="append", default=[],
        help="plan again with a field changed, such as numGenerations=16, and show the difference",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", action="store_true", help="print what every number of GPUs would give"
    )
    parser.add_argument(
        "--show-prompt",
        action="store_true",
        help="print the first prompt as the model reads it; needs the dataset, the tokenizer and "
        "the trainer's packages here",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="print every candidate of the table, not the first twelve",
    )


def run(options: Namespace) -> int:
    """Plans every job that is asked for; the exit code is the worst of them."""
    jobs = requested_jobs(options)
    # A wrong option for any job is refused before the first plan is printed.
    specs = [_requested_specs(options, job) for job in jobs]
    results = []
    code = PLANNED
    for job, job_specs in zip(jobs, specs, strict=True):
        result, job_code = _plan_job(options, job, job_specs)
        results.append(result)
        code = max(code, job_code)
    if options.output in ("json", "yaml"):
        plans = [result.model_dump(mode="json") for result in results]
        print_document(options.output, plans[0] if len(plans) == 1 else {"items": plans})
    return code


class RequestedSpecs(NamedTuple):
    """What is planned for one job."""

    job_class: "AppliedJobClass | None"
    spec: GRPOJobSpec
    """With the class."""
    changed: dict[str, GRPOJobSpec]
    """The spec with each change of --what-if."""


def _requested_specs(options: Namespace, job: Job) -> RequestedSpecs:
    """Apply the job's class and the options to one job.

    Raises:
        CliError: they don't go with this job.
    """
    job_class = None if options.model else job_classes.class_of(options, job)
    spec = job_classes.with_class(job.spec, job_class, job.metadata)
    _refuse_slips(options, spec)
    changed_specs = {}
    for change in options.what_if:
        changed = with_change(job.spec, change)
        changed_specs[change] = job_classes.with_class(changed, job_class, job.metadata)
    return RequestedSpecs(job_class, spec, changed_specs)


def _plan_job(options: Namespace, job: Job, specs: RequestedSpecs) -> tuple[PlanResult, int]:
    """Plan one job and show it, unless all plans are one document; return its exit code, too."""
    name, namespace = job.metadata["name"], job.metadata.get("namespace")
    job_class, spec = specs.job_class, specs.spec
    learned = None if options.model else plan_inputs.fetch_learned(options, name, namespace)
    result = plan_inputs.make_plan(options, spec, learned)
    if options.output == "table":
        plan_table.show_plan(console(), name, result, everything=options.all)
        if job_class:
            console().print(job_classes.class_message(spec, job_class))
        if result.chosen:
            plan_table.show_lengths(console(), spec, result.chosen, learned)
        if result.chosen and not options.model:
            plan_table.show_export(console(), name, spec, result.chosen)
            plan_table.show_staged(console(), spec)
        plan_table.show_learned(console(), learned)
    if options.sizes and result.reason not in SPEC_ERRORS:
        from ..show import size_table

        planned = result.chosen.gpus if result.chosen else 0
        size_table.show_sizes(console(), plan_inputs.curve(options, spec, learned), planned)
    code = exit_code(result)
    if options.show_prompt:
        code = max(code, _show_prompt(name, namespace, job.spec))
    for change, changed_spec in specs.changed.items():
        changed = plan_inputs.make_plan(options, changed_spec, learned)
        left_out = unused_changes(spec, changed_spec)
        plan_table.show_difference(console(), change, result, changed, left_out)
        code = max(code, exit_code(changed))
    return result, code


def _refuse_slips(options: Namespace, spec: GRPOJobSpec) -> None:
    """A slip in an option is answered before anything is printed."""
    is_table = options.output == "table"
    if options.show_prompt and options.model:
        raise OptionError("--show-prompt shows a prompt of a job's dataset: name its file by -f")
    if options.show_prompt and not is_table:
        raise OptionError("--show-prompt is shown below the table; leave out -o")
    if options.show_prompt:
        from ..inputs import local_preflight

        local_preflight.require_trainer()
    if options.sizes and not is_table:
        raise OptionError("--sizes is shown as a table; leave out -o")
    if options.sizes and spec.placement.accelerator == "CPU":
        raise OptionError("--sizes compares numbers of GPUs, and spec.placement.accelerator is CPU")
    if options.what_if and not is_table:
        raise OptionError("--what-if is shown as a table; leave out -o")


def _show_prompt(name: str, namespace: str | None, spec: GRPOJobSpec) -> int:
    """Print the first prompt, or why it is missing; return the exit code."""
    from ..inputs import local_preflight
    from ..show.preflight_report import print_prompt, print_report

    out = console()
    report, prompt = local_preflight.check_here(name, namespace, spec, only_prompt=True)
    print_report(out, name, report)
    if prompt:
        print_prompt(out, prompt)
    return WRONG if report.problems else PLANNED


def exit_code(result: PlanResult) -> int:
    """0 planned, 2 the spec is wrong, 3 nothing fits."""
    if result.feasible:
        return PLANNED
    return WRONG if result.reason in SPEC_ERRORS else NOTHING_FITS


SECTIONS = ("training", "placement", "adapter", "reference", "generation", "model", "checkpoint")
"""Where a short key is looked for, in this order."""
ENGINE = "spec.generation.engine"


def with_change(spec: GRPOJobSpec, change: str) -> GRPOJobSpec:
    """The spec with `KEY=VALUE` applied; `gpus=8` pins the number of GPUs, and `KEY=null` unsets a
    field.

    Another engine comes without the settings of the one before; see left_out.

    Raises:
        OptionError: the key names no field, there is no `=`, the value is no YAML or not allowed
            there.
    """
    key, separator, text = change.partition("=")
    if not separator:
        raise OptionError(f"--what-if {change!r} has no value; write it as numGenerations=16")
    try:
        value = load_value(text)
    except ValueError as error:
        raise OptionError(f"--what-if {change!r}: {text!r} is no YAML value") from error
    if key == "gpus" and isinstance(value, int):
        value = {"min": value, "max": value}
    path = path_of(key)
    try:
        for other_path in _others_settings(spec, value) if path == ENGINE else ():
            spec = with_value(spec, other_path, None)
        return with_value(spec, path, value)
    except SpecInvalid as error:
        raise OptionError(
            *(f"--what-if {change}: {problem}" for problem in error.problems)
        ) from error


def unused_changes(before: GRPOJobSpec, after: GRPOJobSpec) -> list[str]:
    """Paths of what a change of the engine took away with it: settings that belong to the one
    before."""
    engine = after.generation.engine
    return [] if engine == before.generation.engine else _others_settings(before, engine)


def _others_settings(spec: GRPOJobSpec, engine: object) -> list[str]:
    """Paths of what is set and belongs to engines other than this; without an engine it is the
    default."""
    wanted = spec.generation.model_copy(update={"engine": engine or GenerationSpec().engine})
    return wanted.settings_of_other_engines()


def path_of(key: str) -> str:
    """Return the path that a key means: the key itself if it begins with `spec.`, else the field
    with this name.

    Raises:
        OptionError: no field has this name.
    """
    if key.startswith("spec."):
        return key
    if "." in key and key.split(".", maxsplit=1)[0] in SECTIONS:
        return f"spec.{key}"
    name = to_camel(key)
    field_paths: dict[str, str] = {}
    for section in SECTIONS:
        kind = GRPOJobSpec.model_fields[section].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name_in_python, field in kind.model_fields.items():
                alias = field.alias or name_in_python
                field_paths.setdefault(alias, f"spec.{section}.{alias}")
    if name in field_paths:
        return field_paths[name]
    close = get_close_matches(name, field_paths, n=1)
    other_name = other_name_hint(("training", key)) or "write the path, spec.training.…"
    hint = f"did you mean {close[0]}?" if close else other_name
    raise OptionError(f"--what-if: {key!r} is no field of {', '.join(SECTIONS)}; {hint}")
