"""Object stores on loopback that speak S3, for tests: versitygw, built here, and moto, a second
implementation.

What a store must keep (conditional writes) is kept by each in its own way, so what holds on both is
not one's habit.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request

from ..controlplane import free_port
from .build import toolchain
from .cache import cache_root, cached
from .processes import server_process
from .python_packages import install_packages

MOTO = "moto[s3,server]==5.2.5"
ACCESS, SECRET = "tester", "testing-only"
BUCKET = "bucket"
CREDENTIALS: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
"""Environment variables with the credentials of the stores' clients."""


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[str]:
    """A store of this kind with an empty BUCKET, whose objects, if it keeps any on a disk, are in
    the folder; yields its URL.

    Raises:
        ClusterError: it can't be built or installed, or doesn't answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command, environment = _versitygw(folder, port) if kind == "versitygw" else _moto(port)
    endpoint = f"http://127.0.0.1:{port}"
    # moto is asked for its bucket; versitygw has taken a folder for one, and refuses who doesn't
    # sign
    bucket = Request(f"{endpoint}/{BUCKET}", method="PUT")
    with server_process(kind, command, folder, bucket, environment):
        yield endpoint


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
