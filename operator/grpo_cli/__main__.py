"""The command line `grpo`, also installed as `kubectl-grpo` (`kubectl grpo …`).

Each command is a module with `register(commands)`, which adds its parser and sets `run(options) -> exit code`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from grpo_api.job import SpecInvalid

from . import logs, plan, render, status
from .errors import WRONG, CliError

COMMANDS = (plan, render, status, logs)
INTERRUPTED = 130
"""Exit code that shells give a program which SIGINT has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 2 if the arguments, the file or the cluster are not what it needs, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (CliError, SpecInvalid) as error:
        problems = error.problems if isinstance(error, SpecInvalid) else [str(error)]
        for problem in problems:
            print(f"grpo: {problem}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo", description="Plans, renders and watches GRPO training jobs.")
    parser.add_argument("--version", action="version", version=version("grpo-operator"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
