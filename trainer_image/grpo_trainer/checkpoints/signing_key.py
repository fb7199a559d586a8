"""Signs in a process of its own, so that the key is never in the memory of the one that trains.

That one may dump core, and starts programs that users wrote. `python -m
grpo_trainer.checkpoints.signing_key` neither dumps core nor can be traced by others of its user; it
reads the mounted key, signs what comes in and ends. Without input it only tries the key, which is
what an attempt begins with: a wrong key must not show up after days of training.
"""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

from grpo_api.text.contract import SIGNING_KEY, SIGNING_KEY_ENV

from ..runtime.errors import BadInput

FIELD = "spec.export.signingKeySecretRef"
UNUSABLE = 3
"""Exit code of the signing process when the key can't be used; its standard output has the
reason."""
_PR_SET_DUMPABLE = 4
"""prctl(2)."""


def require_key() -> None:
    """Tries the key.

    Raises:
        BadInput: it can't be used to sign.
    """
    _run("try", b"")


def sign_payload(payload: bytes) -> bytes:
    """The envelope around the payload, as one line of JSON.

    Raises:
        BadInput: the key can't be used.
    """
    return _run("sign", payload)


def _run(action: str, payload: bytes) -> bytes:
    path = os.environ.get(SIGNING_KEY_ENV, SIGNING_KEY)
    command = [sys.executable, "-m", __name__, action, path]
    completed_process = subprocess.run(command, input=payload, stdout=subprocess.PIPE, check=False)
    if completed_process.returncode == UNUSABLE:
        raise BadInput(
            f"{FIELD}: {completed_process.stdout.decode()}; store one by `kubectl create secret "
            "generic NAME --from-file=key.pem`"
        )
    # Any other failure is not of the key.
    completed_process.check_returncode()
    return completed_process.stdout


def main(action: str, path: str) -> int:
    """The process: tries the key, or signs what comes in."""
    # Only this process needs `cryptography`; the one that trains imports this module, too.
    from grpo_api.provenance.signing import KeyUnusable, private_key, sign

    # A core dump would hold the key, and a tracer of the same user could read it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        key = private_key(Path(path))
    except KeyUnusable as error:
        sys.stdout.write(str(error))
        return UNUSABLE
    if action == "sign":
        sys.stdout.write(sign(sys.stdin.buffer.read(), key).model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
