"""`python -m grpo_trainer.delivery`: the pod of `grpo export`, and of commands that read a run's
history.

`serve` is the container's command: it prepares the folder and stays as long as somebody asks for
it. `list` and `send` are run beside it by `kubectl exec`. Each answers one question on stdout and
ends: which files there are, or the bytes of one file from an offset on. Neither needs torch.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from grpo_api.text.clock import Clock
from grpo_api.text.contract import SCRATCH

from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.logs import configure_logs
from .serving import published_listing, record_request, served_source

log = logging.getLogger("grpo_trainer")

BEAT_SECONDS = 5.0
"""Between two empty lines while the folder is being prepared: proxies cut connections on which
nothing moves."""


def send_listing(state: Path, out: BinaryIO, clock: Clock = SYSTEM_CLOCK) -> int:
    """Print the listing as one line of JSON as soon as there is one; empty lines until then."""
    while (listing := published_listing(state)) is None:
        record_request(state)
        out.write(b"\n")
        out.flush()
        clock.sleep(BEAT_SECONDS)
    record_request(state)
    out.write(f"{listing.model_dump_json()}\n".encode())
    out.flush()
    return 0


def send_file(
    state: Path, name: str, offset: int, out: BinaryIO, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Print a file's bytes from that offset to its end.

    Raises:
        OSError: it can't be read, or the reader of what is printed is gone.
        StoreFailed: its store gave nothing for too long.
    """
    for chunk in served_source(state, clock).read(name, offset):
        record_request(state)
        out.write(chunk)
    out.flush()


STATE = Path(SCRATCH) / "delivery"
"""What the processes of the pod know of each other."""


def main(arguments: Sequence[str] | None = None, state: Path = STATE) -> int:
    """Run one of the commands; returns the exit code."""
    options = _options(arguments)
    if options.command == "list":
        return send_listing(state, sys.stdout.buffer)
    if options.command == "send":
        send_file(state, options.name, options.offset, sys.stdout.buffer)
        return 0
    configure_logs()
    from . import serving  # what prepares a folder needs more than what is asked often

    # The first process of a container has no default for it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return serving.serve(state, options.dtype, merge=options.merge, history=options.history)
    except Exception as error:
        log.exception("ended by an error")
        return serving.refuse(f"{type(error).__name__}: {error}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m grpo_trainer.delivery", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="prepare the folder and wait for requests")
    serve.add_argument("--merge", action="store_true", help="merge the adapter into its base")
    serve.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the weights; unset: as they are"
    )
    serve.add_argument("--history", action="store_true", help="the run's history, not its model")
    commands.add_parser("list", help="print the folder's files as JSON, once they are there")
    send = commands.add_parser("send", help="print a file")
    send.add_argument("name")
    send.add_argument("offset", type=int, help="first byte to print")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
