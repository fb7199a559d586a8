"""`python -m tools.gpu accept|show|kit|bare-machine`: `make gpu`, `make gpu-kit` and its test."""

import argparse
import subprocess
import sys
from pathlib import Path

from grpo_acceptance.report import RESULT
from harness.programs.processes import ClusterError

from . import bare_machine, kit, page


def main() -> int:
    """Run the command; errors go to stderr in one sentence and the exit code is 1."""
    parser = _parser()
    options, rest = parser.parse_known_args()
    options.rest = rest
    if rest and options.run is not accept:
        parser.error(f"unknown: {' '.join(rest)}")
    try:
        return int(options.run(options))
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def accept(options: argparse.Namespace) -> int:
    """The acceptance run on this machine; what it finds on a GPU goes into docs/internals/gpu.md.
    Its exit
    code."""
    command = [
        sys.executable,
        "-m",
        "grpo_acceptance",
        "--output",
        str(options.output),
        *options.rest,
    ]
    code = subprocess.run(command, check=False).returncode
    result = options.output / RESULT
    if code in (0, 1) and page.publish([result]):
        print(f"{page.PAGE} shows this result now")
    return code


def show(options: argparse.Namespace) -> int:
    """The results of a run that came in parts, on the page."""
    if page.publish(options.results):
        return 0
    raise ClusterError(f"{page.PAGE} shows results of GPUs only, and one of these is of a CPU")


def pack(options: argparse.Namespace) -> int:
    """The kit."""
    size = kit.pack(options.output, options.python, options.engine)
    print(
        f"{options.output}: the kit for Python {options.python}, {size / 1e6:.1f} MB; see "
        "docs/internals/gpu.md"
    )
    return 0


def prepare(_: argparse.Namespace) -> int:
    """The kit and the packages of a machine without it, in the cache."""
    print(*bare_machine.prepare(), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("accept", help="run the acceptance on this machine's GPUs")
    command.add_argument("--output", type=Path, required=True, help="folder for its files")
    command.set_defaults(run=accept)
    command.epilog = "Other options go to grpo_acceptance."
    command = commands.add_parser("show", help="show results that came in parts on the page")
    command.add_argument("results", type=Path, nargs="+", help="result.json of each part, in order")
    command.set_defaults(run=show)
    command = commands.add_parser("kit", help="gather what a bare machine lacks")
    command.add_argument("--output", type=Path, required=True, help="folder for the kit; replaced")
    command.add_argument("--python", default="3.12", help="version of the other machine's Python")
    command.add_argument(
        "--engine", type=int, help="architecture of the GPU, such as 90: vLLM lies beside the kit"
    )
    command.set_defaults(run=pack)
    command = commands.add_parser("bare-machine", help="download what the test of the kit needs")
    command.set_defaults(run=prepare)
    return parser


if __name__ == "__main__":
    sys.exit(main())
