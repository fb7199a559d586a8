"""What every thread of a process was doing when it stood still, for the message that says so.

faulthandler writes in C, on SIGUSR1, also while the GIL is held, which is where Python code can't look and where a
debugger would need ptrace, which restricted pods don't have. So the watchdog takes the stacks of its own process, and
the supervisor those of a process that can't.
"""

import faulthandler
import os
import re
import signal
import threading
from pathlib import Path

from grpo_api.report.report import FRAME_CHARACTERS, MAX_FRAMES, Outcome, Standstill
from grpo_api.report.termination_message import with_standstill

STACKS_ENV = "GRPO_STACKS"
"""File for this process's stacks, set by the supervisor; without it the file has no name."""
MAX_TEXT = 256 * 1024
"""Characters of stacks that are kept: the last ones, for each request adds to the file."""
WRITES_STACKS = signal.SIGUSR1
OWN = ("grpo_trainer/", "trl/")
"""Code whose frames say most: what the run was doing, by the trainer's and TRL's names for it."""
WAITING = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/")
"""Code in which a rank waits for the others; in a backward pass it is torch's own threads that talk to them."""
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SITE = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+|trainer_image|operator)/")


class Stacks:
    """This process's file of stacks."""

    def __init__(self) -> None:
        name = os.environ.get(STACKS_ENV)
        path = Path(name) if name else Path(f"/proc/self/fd/{os.memfd_create('stacks')}")
        self._file = path.open("a+", encoding="utf-8", errors="replace")
        self._file.write(f"main 0x{threading.main_thread().ident or 0:016x}\n")
        self._file.flush()

    def listen(self) -> None:
        """From now on SIGUSR1 adds the stacks of all threads to the file."""
        faulthandler.register(WRITES_STACKS, file=self._file, all_threads=True)

    def take(self) -> str:
        """The stacks of all threads now, and those that were asked for before."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        return self._file.read()[-MAX_TEXT:]


def read_stacks(path: Path) -> str:
    """The stacks that another process has written; empty if it wrote none."""
    return path.read_text(encoding="utf-8", errors="replace")[-MAX_TEXT:] if path.is_file() else ""


def stood_still(outcome: Outcome, silent_seconds: float, stacks: str) -> Outcome:
    """The outcome with where its process stood, as much of it as a termination message has room for."""
    frames = main_frames(stacks)
    inner = next((at for at, frame in enumerate(frames) if frame.startswith(OWN)), len(frames))
    waiting = any(frame.startswith(WAITING) for frame in frames[:inner])
    found = Standstill(silent_seconds=max(0.0, silent_seconds), waiting=waiting, frames=telling(frames, MAX_FRAMES))
    return with_standstill(outcome, found)


def main_frames(stacks: str) -> list[str]:
    """The main thread's frames as they were written last, innermost first; empty where the text has none.

    Each as `path:line in function`, the path from the package on. faulthandler names threads by number alone, so the
    number of the main thread stands in the first line.
    """
    lines = stacks.splitlines()
    main = next((line.removeprefix("main ") for line in lines if line.startswith("main 0x")), "none")
    start = len(lines)
    for at, line in enumerate(lines):
        if main in line and line.endswith("(most recent call first):"):
            start = at + 1
    frames: list[str] = []
    for line in lines[start:]:
        found = _FRAME.match(line)
        if found is None:
            break
        frames.append(f"{_SITE.sub('', found['path'])}:{found['line']} in {found['function']}"[:FRAME_CHARACTERS])
    return frames


def telling(frames: list[str], most: int) -> list[str]:
    """At most `most` of the frames, in their order: prefers the innermost, then those of our own and TRL's code."""
    order = sorted(range(len(frames)), key=lambda at: (at > 0, not frames[at].startswith(OWN), at))
    return [frames[at] for at in sorted(order[:most])]
