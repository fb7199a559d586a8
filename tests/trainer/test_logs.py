"""The log of a training process: every line is JSON with the job's name, libraries' lines among
them; on a terminal it is text."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.realtime

PROGRAM = """
import json, logging, sys, warnings
from logging.config import dictConfig
from pathlib import Path
from grpo_api.plan.plan import JobIdentity
from grpo_trainer.runtime.logs import adopt_library_logs, configure_logs, vllm_logging
configure_logs(JobIdentity(namespace="team", name="run", uid="u", attempt=2), rank=3)
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler(sys.stdout))
library.propagate = False
adopt_library_logs()
library.warning("of a library")
warnings.warn("of Python,\\non two lines")
for module in ("transformers.training_args", "trl", "mine.rewards"):
    place = f"/lib/site-packages/{module}"
    warnings.warn_explicit(f"old in {module}", FutureWarning, place, 7, module)
logging.getLogger("httpx").info("one for each request")
logging.getLogger("grpo_trainer.training").info("step 1 of 2", extra={"step": 1})
settings = vllm_logging(Path(sys.argv[1]))
dictConfig(json.loads(Path(settings["VLLM_LOGGING_CONFIG_PATH"]).read_text()))
logging.getLogger("vllm.engine").info("of an engine's process")
"""


def test_every_line_names_the_job_whoever_wrote_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    own, warning, of_user, step, engine = lines
    assert own["message"] == "of a library"
    assert warning["message"] == "UserWarning: of Python, on two lines (<string>:13)"
    assert of_user["message"] == "FutureWarning: old in mine.rewards (mine.rewards:7)"
    assert (step["message"], step["step"]) == ("step 1 of 2", 1)
    assert engine["message"] == "of an engine's process"
    job = {"namespace": "team", "grpojob": "run", "attempt": 2, "rank": 3}
    assert all(job.items() <= line.items() for line in lines)
    assert done.stderr == ""


def test_on_a_terminal_it_is_text(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(command, stdout=writer, stderr=writer, check=True)
    os.close(writer)
    text = read_whole(reader)
    os.close(reader)
    assert "warning rank 3 of a library" in text
    assert "info    rank 3 step 1 of 2 step=1" in text
    assert "{" not in text


def read_whole(terminal: int) -> str:
    """What was printed on a terminal that nobody holds any more; it comes in parts."""
    parts: list[bytes] = []
    with suppress(OSError):  # EIO: all of it was read
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts).decode()
