"""`python -m tests.integration.chaos --faults 1000 --seed 7`: one storm, told as it goes; 1 on a
violation."""

import argparse
import sys
import tempfile
from pathlib import Path

from .run import storm


def main() -> int:
    """Runs it and prints what was seen."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="a regular expression that the kinds of the faults must match"
    )
    parser.add_argument(
        "--no-fence", action="store_true", help="let operators write that do not lead"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))

    def say(text: str) -> None:
        print(text, flush=True)

    report = storm(given.faults, given.seed, folder, say, given.only, fence=not given.no_fence)
    print(report.table())
    print(f"{report.faults} faults, seed {report.seed}, {report.seconds:.0f} s")
    print(
        f"{report.jobs} jobs in {report.attempts} attempts, {report.certain} of which had to be "
        "counted as failures"
    )
    print(f"{len(report.violations)} violations; the operators' logs: {folder}")
    for one in report.violations:
        print(f"- {one}")
    if report.violations:
        print(f"the same again: {report.command()}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
