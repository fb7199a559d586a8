"""The process of one tracker: `python -P -m grpo_trainer.tracking.tracker_child FD PARENT_PID`.

It holds transformers' own callback of the tracker, the one that `report_to` would put into the
trainer. It calls that as the trainer would. Without torch, transformers takes 1.4 s and 70 MiB
instead of 10 s and 470 MiB. So torch is hidden from this process.

Protocol on the socket FD, in JSON: first `{}`, as soon as it reads; then one answer to each
request. The first request opens the run (RunRequest). `{"step", "groups", "logs"}` is a row,
which with groups is a table of completions. `{"end"}` ends the run. `{"problem"}` answers what
failed for good, `{"refused"}` a row that the tracker raised on.
"""

import ctypes
import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, cast

from grpo_api.text.contract import tracking_token_env
from grpo_api.text.messages import plain_text

from ..runtime.hidden_library import hide_libraries
from .packages import search_path

_PR_SET_PDEATHSIG = 1
_NICE = 10
_MAX_PROBLEM = 300


def main() -> None:
    """Serve the parent until it ends the run or closes the socket."""
    _die_with(int(sys.argv[2]))
    sys.path[:] = search_path()
    with Connection(int(sys.argv[1])) as parent:
        try:
            _serve(parent)
            # The parent ends this process: exit handlers of trackers may wait for their servers
            # once more.
            signal.pause()
        except EOFError:
            return


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent's thread dies: a tracker that hangs can't notice a
    closed socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the training process ended before its tracker's process began")


def _yield_cores_to_training() -> None:
    """Lower the priority of this process, its threads and the servers that it has started."""
    priority = os.getpriority(os.PRIO_PGRP, 0) + _NICE
    os.setpriority(os.PRIO_PGRP, 0, priority)


def _serve(parent: Connection) -> None:
    """Open the run, and do what is asked of it until its end."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # transformers looks for it when it is imported.
    hide_libraries("torch")
    from .tracked_runs import RunRequest, open_run

    _send(parent, {})
    request = cast(RunRequest, _receive(parent))
    token = os.environ.pop(tracking_token_env(request["tracker"]), "").strip()
    try:
        run = open_run(request, token)
    except Exception as error:
        _send(parent, {"problem": _error_message(error, token)})
        return
    # Not before: on busy cores the imports would take a minute. A run that is preempted soon after
    # its begin waits 10 s for its trackers, and its rows would be lost.
    _yield_cores_to_training()
    _send(parent, {"run_id": run.run_id, "url": run.url})
    while True:
        message = _receive(parent)
        try:
            if "end" in message:
                run.finish(message["end"])
                _send(parent, {})
                return
            if message["groups"]:
                run.log_table(message["step"], message["groups"])
            else:
                run.log(message["step"], message["logs"])
        except Exception as error:
            kind = "problem" if "end" in message else "refused"
            _send(parent, {kind: _error_message(error, token)})
        else:
            _send(parent, {})


def _error_message(error: Exception, token: str) -> str:
    """The error in one line without secrets, the token among them."""
    text = f"{type(error).__name__}: {error}"
    if token:
        text = text.replace(token, "***")
    line = plain_text(text)
    return line.encode(errors="replace").decode()[:_MAX_PROBLEM]


def _receive(parent: Connection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(parent.recv_bytes())
    return message


def _send(parent: Connection, answer: dict[str, Any]) -> None:
    try:
        parent.send_bytes(json.dumps(answer).encode())
    except OSError as error:  # the parent has closed the socket
        raise EOFError from error


if __name__ == "__main__":
    main()
    os._exit(0)
