"""`python -m grpo_codegen.calibration fit`: fit the time model to calibration.yaml and store it.

With `--without SOURCE` it fits without that source's runs, prints what the fit says of them, and
stores nothing. SOURCE is a key of `sources`, or its beginning.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import yaml

from grpo_planner.time import constants as time_constants
from grpo_planner.time.constants import Constants, StoredFit

from .fit import FitErrors, errors_of, fit, fit_with_errors
from .rows import Prediction, predictions, published_runs

HEAD = (
    "# Written by `python -m grpo_codegen.calibration fit`; docs/internals/step-times.md says what "
    "each one means.\n"
)


def main() -> None:
    """Parse the arguments and fit."""
    parser = argparse.ArgumentParser(prog="python -m grpo_codegen.calibration")
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit the constants of the time model")
    fitting.add_argument("--without", metavar="SOURCE", help="leave a source's runs out")
    arguments = parser.parse_args()
    if arguments.without:
        _predict_source(arguments.without)
    else:
        _store()


def _store() -> None:
    """Fit to all runs, and store the constants and their errors."""
    _, rows = published_runs()
    fitted, errors = fit_with_errors(rows)
    Path(time_constants.__file__).with_name("constants.yaml").write_text(constants_text(fitted))
    Path(__file__).with_name("errors.yaml").write_text(errors_text(errors))
    for part, each in errors.parts.items():
        near = f"{each.near:.0%} within 1.5x"
        print(f"{part}: {each.count}, half within {each.median}x, {near}, worst {each.worst}x")
    print("wrote constants.yaml and errors.yaml; run `python -m grpo_codegen` for the page")


def _predict_source(source: str) -> None:
    """Predict a source's runs by a fit without them."""
    sources, rows = published_runs()
    left_out = [row for row in rows if row.source.startswith(source)]
    if not left_out:
        raise SystemExit(f"no source begins with {source}: there are {', '.join(sources)}")
    constants = fit([row for row in rows if row not in left_out])
    predicted = [each for row in left_out for each in predictions(row, constants)]
    for each in predicted:
        print(_line(each))
    for part in dict.fromkeys(each.part for each in predicted):
        errors = errors_of([each for each in predicted if each.part == part])
        print(f"{part}: half within {errors.median:.2f}x, worst {errors.worst:.2f}x")
    print(_values(constants))


def _line(each: Prediction) -> str:
    row = each.row
    run = f"{row.source} {row.model} {row.gpus} x {row.gpu}"
    numbers = f"published {each.published:.4g} s, predicted {each.predicted:.4g} s"
    return f"{run} {each.part}: {numbers}, {each.ratio:.2f}x"


def _values(constants: Constants) -> str:
    return ", ".join(f"{name} {getattr(constants, name):.4g}" for name in constants.meanings())


def constants_text(fitted: StoredFit) -> str:
    """The text of constants.yaml."""
    return HEAD + yaml.safe_dump(asdict(fitted), sort_keys=False)


def errors_text(errors: FitErrors) -> str:
    """The text of errors.yaml."""
    return HEAD + yaml.safe_dump(errors.model_dump(), sort_keys=False)


if __name__ == "__main__":
    main()
