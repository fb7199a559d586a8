"""Run realtime tests again and again on one core that another process keeps busy: `make
flaky-check`.

Without names it takes the test files that differ from `main`. It stops at the first failure, since
a test that fails once in ten times fails by chance in somebody's run.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROUNDS = 10
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends also when its parent is killed."""
NO_TESTS = 5
"""pytest's exit code when none of the files' tests is marked."""


def changed_files() -> list[str]:
    """Return the test files that differ from where this branch left `main`, new ones too."""
    base = _git("merge-base", "HEAD", "main")[0]
    names = [
        *_git("diff", "--name-only", "--diff-filter=d", base),
        *_git("ls-files", "--others", "--exclude-standard"),
    ]
    return sorted({name for name in names if Path(name).match("tests/*/test_*.py")})


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


@contextmanager
def busy_core(core: int) -> Iterator[subprocess.Popen[bytes]]:
    """Keep a core busy until the block ends, and bind this process and its children to the same
    core.

    Yields the process that does it.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    loop = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield loop
    finally:
        loop.kill()
        loop.wait()
        os.sched_setaffinity(0, before)


def repeat(tests: list[str], rounds: int) -> int:
    """Run the realtime tests among them up to `rounds` times; return the exit code of the first bad
    run, else 0."""
    for number in range(1, rounds + 1):
        print(f"== round {number} of {rounds}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *tests,
            "-m",
            "realtime and not soak",
            "-x",
            "-q",
            f"--hypothesis-seed={number}",
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code == NO_TESTS:
            print("none of these tests is marked realtime")
            return 0
        if code:
            print(f"failed in round {number} of {rounds}, with --hypothesis-seed={number}")
            return code
    return 0


def main() -> int:
    """Check the tests of the command line, or those that changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.flaky_check", description=__doc__)
    parser.add_argument(
        "tests", nargs="*", help="files or ids of tests; without any, the files that changed"
    )
    tests = parser.parse_args().tests or changed_files()
    if not tests:
        print("no test file differs from main")
        return 0
    with busy_core(min(os.sched_getaffinity(0))):
        return repeat(tests, ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
