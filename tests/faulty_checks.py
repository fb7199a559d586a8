"""Checks of an acceptance run that end badly; `python -m tests.faulty_checks` is the acceptance
command with them."""

import os
import subprocess
import sys
import time

from grpo_acceptance import __main__ as acceptance
from grpo_acceptance.findings import Check, Context, Finding, make_finding

CHILD = "child.pid"


def passes(context: Context) -> list[Finding]:
    """Says where it ran."""
    return [
        make_finding(
            "passes",
            [],
            f"{context.device}, {context.world} ranks, GPUs {os.environ['CUDA_VISIBLE_DEVICES']!r}",
        )
    ]


def aborts(_: Context) -> list[Finding]:
    """Ends as a process does over a broken CUDA context."""
    print("CUDA error: device-side assert triggered", flush=True)
    os.abort()


def hangs(context: Context) -> list[Finding]:
    """Waits for ever, and so does what it has started."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.path / CHILD).write_text(str(child.pid))
    time.sleep(600)
    return []


def one_rank_raises(context: Context) -> list[Finding]:
    """The last rank raises while the others wait for it."""
    if context.rank == context.world - 1:
        raise RuntimeError("NCCL error")
    time.sleep(600)
    return []


if __name__ == "__main__":
    names = ("passes", "hangs", "aborts")
    checks = tuple(Check(name, "tests.faulty_checks", name, 600) for name in names)
    setattr(acceptance, "CHECKS", checks)  # noqa: B010  # the command's own list
    sys.exit(acceptance.main())
