"""An image registry and a Python package index on loopback or on the nodes' network: what a release
is published to in a rehearsal.

The registry and skopeo come from Debian's packages, the index is pypiserver; both take uploads from
anybody, so they listen only where the rehearsal is.
"""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml

from ..controlplane import free_port
from .cache import cache_root, cached
from .debian import unpack
from .processes import ClusterError, until
from .python_packages import install_packages

PYPISERVER = "pypiserver==2.4.2"
START_SECONDS = 60.0


def registry_program() -> Path:
    """Return the path of the registry, fetched on first use (10 MB)."""
    return _debian("docker-registry")


def skopeo() -> Path:
    """Return the path of skopeo, which copies images from archives to registries."""
    return _debian("skopeo")


def _debian(package: str) -> Path:
    folder = cached(cache_root() / f"{package}-debian", partial(unpack, package))
    return folder / "usr" / "bin" / package


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
    command = [str(registry_program()), "serve", str(file)]
    with _served("the registry", command, {}, folder, f"http://{address}/v2/"):
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
    options = ["-i", "127.0.0.1", "-p", str(port), "-a", ".", "-P", ".", "--disable-fallback"]
    command = [sys.executable, "-m", "pypiserver", "run", *options, str(packages)]
    url = f"http://127.0.0.1:{port}"
    environment = {"PYTHONPATH": str(index_packages())}
    with _served("the package index", command, environment, folder, f"{url}/simple/"):
        yield url


@contextmanager
def _served(
    name: str, command: list[str], environment: Mapping[str, str], folder: Path, url: str
) -> Iterator[None]:
    """Run a server while the block runs, once it answers at the URL; its log is in the folder."""
    log_file = folder / f"{Path(command[0]).name}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)

    def has_answered() -> bool:
        if process.poll() is not None:
            raise ClusterError(f"{name} ended: {log_file.read_text()[-500:]}")
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.HTTPError as error:
            error.close()
        return True

    try:
        until(f"{name} at {url}", has_answered, START_SECONDS)
        yield
    finally:
        process.kill()
        process.wait()
