"""An image registry and a Python package index on loopback or on the nodes' network: what a release
is published to in a rehearsal.

The registry and skopeo come from Debian's packages, the index is pypiserver; both take uploads from
anybody, so they listen only where the rehearsal is.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request

import yaml

from ..controlplane import free_port
from . import debian
from .cache import cache_root, cached
from .processes import server_process
from .python_packages import install_packages

PYPISERVER = "pypiserver==2.4.2"


def registry_program() -> Path:
    """Return the path of the registry (10 MB)."""
    return debian.program("docker-registry", "docker-registry")


def skopeo() -> Path:
    """Return the path of skopeo, which copies images from archives to registries."""
    return debian.program("skopeo", "skopeo")


def index_packages() -> Path:
    """Return pypiserver's own folder of packages."""
    version = PYPISERVER.rpartition("==")[2]
    folder = cache_root() / f"pypiserver-{version}"
    return cached(folder, lambda part: install_packages(part, PYPISERVER))


@contextmanager
def serve_registry(folder: Path, host: str) -> Iterator[str]:
    """Serve an empty image registry by plain HTTP, with its data in the folder; yield host:port.

    Raises:
        ClusterError: it can't be fetched, or doesn't answer.
    """
    address = f"{host}:{free_port()}"
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "images")}},
        "http": {"addr": address},
    }
    file = folder / "registry.yml"
    file.write_text(yaml.safe_dump(settings))
    command = [registry_program(), "serve", file]
    with server_process("the registry", command, folder, Request(f"http://{address}/v2/"), {}):
        yield address


@contextmanager
def serve_index(folder: Path) -> Iterator[str]:
    """Serve an empty package index on loopback, with its files in the folder; yield its URL.

    It takes uploads at this URL, and pip finds packages at `<URL>/simple/`.

    Raises:
        ClusterError: it can't be installed, or doesn't answer.
    """
    packages = folder / "packages"
    packages.mkdir()
    port = free_port()
    # `-a . -P .`: uploads need no password
    options = ["-i", "127.0.0.1", "-p", port, "-a", ".", "-P", ".", "--disable-fallback"]
    command = [sys.executable, "-m", "pypiserver", "run", *options, packages]
    url = f"http://127.0.0.1:{port}"
    environment = {"PYTHONPATH": str(index_packages())}
    request = Request(f"{url}/simple/")
    with server_process("the package index", command, folder, request, environment):
        yield url
