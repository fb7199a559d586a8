"""Object stores on loopback that speak S3, for tests: versitygw, built here, and moto, a second
implementation.

What a store must keep (conditional writes) is kept by each in its own way, so what holds on both is
not one's habit.
"""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..controlplane import free_port
from .build import toolchain
from .cache import cache_root, cached
from .processes import ClusterError, until
from .python_packages import install_packages

MOTO = "moto[s3,server]==5.2.5"
ACCESS, SECRET = "tester", "testing-only"
BUCKET = "bucket"
CREDENTIALS: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
"""Environment variables with the credentials of the stores' clients."""


@dataclass(frozen=True, slots=True)
class ServedStore:
    """A store that is being served."""

    kind: str
    endpoint: str


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[ServedStore]:
    """A store of this kind with an empty BUCKET, whose objects, if it keeps any on a disk, are in
    the folder.

    Raises:
        ClusterError: it can't be built or installed, or doesn't answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command, environment = _versitygw(folder, port) if kind == "versitygw" else _moto(port)
    with (folder / f"{kind}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        until(f"{kind} on port {port}", lambda: _has_bucket(process, endpoint), 60)
        yield ServedStore(kind, endpoint)
    finally:
        process.kill()
        process.wait()


def _versitygw(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    data, meta = folder / "data", folder / "meta"
    (data / BUCKET).mkdir(parents=True)
    meta.mkdir()
    program = str(toolchain(("versitygw",)).program("versitygw"))
    keys = ["--access", ACCESS, "--secret", SECRET, "--port", f"127.0.0.1:{port}", "--quiet"]
    return [program, *keys, "posix", "--sidecar", str(meta), str(data)], {}


def _moto(port: int) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return command, {"PYTHONPATH": str(moto_packages())}


def moto_packages() -> Path:
    """Return moto's own folder of packages: it needs other versions than the trainer."""
    key = MOTO.rpartition("==")[2]
    return cached(cache_root() / f"moto-{key}", lambda part: install_packages(part, MOTO))


def _has_bucket(process: "subprocess.Popen[bytes]", endpoint: str) -> bool:
    """Whether the store answers; moto is asked for its bucket, versitygw has taken a folder for
    one."""
    if process.poll() is not None:
        raise ClusterError(
            f"the object store at {endpoint} ended with exit code {process.returncode}"
        )
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        error.close()  # versitygw refuses who doesn't sign
    return True
