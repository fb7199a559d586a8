"""A writer of event files that fails as the last part of its folder's name says. It stands in for
the package of this name, behind transformers' own callback, in a tracker's process."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any


class SummaryWriter:
    """Writes JSON lines to `rows`."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self._fault = Path(folder).name
        self._file = (Path(folder) / "rows").open("a")
        self._write(purge=purge_step, nice=os.getpriority(os.PRIO_PROCESS, 0))

    def add_text(self, name: str, text: str) -> None:
        """The config."""
        self._write(text=name, characters=len(text))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """One number of a row."""
        if self._fault == "killed" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "hangs":
            time.sleep(3600)
        if self._fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._write(name=name, value=value, step=step, nice=nice)

    def flush(self) -> None:
        """End of a row."""
        self._file.flush()

    def close(self) -> None:
        """End of the run."""
        self._write(closed=True)
        self._file.close()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
