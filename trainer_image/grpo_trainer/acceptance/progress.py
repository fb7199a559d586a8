"""Shows a run while it goes on: a line when a check begins, one per finding when it ends, and the report each time."""

from collections.abc import Sequence
from pathlib import Path

from ..clock import SYSTEM_CLOCK
from . import report
from .catalogue import Check
from .findings import not_run
from .report import Surroundings
from .runner import Done

NEVER_BEGUN = "the run ended before it"
CUT_OFF = "the run ended during it"


class Progress:
    """What has ended so far. The files name every check at any time, so a run that is killed leaves a whole report."""

    def __init__(self, checks: Sequence[Check], where: Surroundings, folder: Path, deadline: float) -> None:
        self.done: list[Done] = []
        self._names = [check.name for check in checks]
        self._where, self._folder, self._deadline = where, folder, deadline

    def begin(self, check: Check, seconds: float) -> None:
        """Say that a check begins, and for how many seconds at most."""
        left = self._deadline - SYSTEM_CLOCK.now()
        print(f"begins   {check.name}, for at most {seconds:.0f} s of {left:.0f} s", flush=True)
        self._write(running=check.name)

    def end(self, done: Done) -> None:
        """Say what a check found."""
        self.done.append(done)
        for finding in done.findings:
            print(f"{finding.state:8} {finding.what}: {finding.message} ({done.seconds} s)", flush=True)
        self._write()

    def _write(self, running: str = "") -> None:
        ended = {one.name for one in self.done}
        open_checks = [name for name in self._names if name not in ended]
        reasons = [CUT_OFF if name == running else NEVER_BEGUN for name in open_checks]
        unfinished = [Done(name, [not_run(name, why)]) for name, why in zip(open_checks, reasons, strict=True)]
        report.write(self._folder, self._where, [*self.done, *unfinished])
