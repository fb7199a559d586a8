"""Which jobs a plan is for: those of a file, or one that is named by its model alone.

"Will this model train on these GPUs?" comes before there is a job to write down.
"""

from argparse import ArgumentParser, Namespace
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec

from .errors import OptionError
from .manifest import load_specs

_FIELDS = {
    "parameters": ("model", "parameters"),
    "prompt_length": ("training", "maxPromptLength"),
    "completion_length": ("training", "maxCompletionLength"),
    "steps": ("training", "maxSteps"),
}
"""Options that describe a job without a file, by the section and the field that they set."""


class Wanted(NamedTuple):
    """A job to plan."""

    name: str
    """Of the job, or of the model where there is no job."""
    spec: GRPOJobSpec
    namespace: str | None = None
    """As the file says it."""


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments that say which job."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("model", nargs="?", help="plan this model without a job file, such as Qwen/Qwen2.5-7B-Instruct")
    source.add_argument("-f", "--filename", help="file with GRPOJobs; - is standard input")
    parser.add_argument("--parameters", metavar="SIZE", help="with MODEL: its size, where the planner doesn't know it")
    parser.add_argument("--prompt-length", type=int, metavar="TOKENS", help="with MODEL: longest prompt. Unset: 512")
    parser.add_argument(
        "--completion-length", type=int, metavar="TOKENS", help="with MODEL: longest completion. Unset: 512"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="with MODEL: optimizer steps of the run, for --sizes")


def wanted(options: Namespace) -> list[Wanted]:
    """The jobs that the options name.

    Raises:
        ManifestError: the file can't be read, or a job in it is wrong.
        OptionError: an option means nothing here, or its value is not allowed.
    """
    given = {name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None}
    if options.model is not None:
        return [Wanted(options.model, _of_model(options.model, given))]
    if given:
        option, (section, field) = next(iter(given)), _FIELDS[next(iter(given))]
        raise OptionError(
            f"--{option.replace('_', '-')} goes with a model's name: the file says spec.{section}.{field}; "
            f"to compare, add --what-if {field}={given[option]}"
        )
    jobs = load_specs(options.filename)
    return [Wanted(job.metadata["name"], job.spec, job.metadata.get("namespace")) for job in jobs]


def _of_model(model: str, given: dict[str, Any]) -> GRPOJobSpec:
    """A job with defaults. Neither its dataset nor its reward counts in a plan.

    Raises:
        OptionError: a value is not allowed.
    """
    document: dict[str, Any] = {"model": {"name": model}, "dataset": {"name": "any"}, "rewards": [{"accuracy": {}}]}
    for name, value in given.items():
        section, field = _FIELDS[name]
        document.setdefault(section, {})[field] = value
    try:
        return parse_spec(document)
    except SpecInvalid as error:
        raise OptionError(*error.problems) from error
