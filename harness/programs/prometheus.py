"""Prometheus and promtool, from Debian's package without installing it: what metrics and alerts are
put to.

Only Prometheus knows whether it can read what we write.
"""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from ..controlplane import free_port
from .cache import cache_root, cached
from .debian import unpack
from .patience import wait_for_exit
from .processes import ClusterError

PACKAGE = "prometheus"
SECONDS = 60.0
"""Longest wait for an answer."""


def program(name: str) -> Path:
    """Path of `prometheus` or `promtool`, fetched on first use (20 MB).

    Raises:
        ClusterError: the package can't be downloaded; this works on Debian and its derivatives.
    """
    return (
        cached(cache_root() / f"{PACKAGE}-debian", partial(unpack, PACKAGE)) / "usr" / "bin" / name
    )


@contextmanager
def serving(folder: Path, settings: dict[str, Any], *options: str) -> Iterator[str]:
    """A Prometheus with these settings, which keeps what it scrapes in the folder's `data`; yields
    its address."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    own = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [str(program("prometheus")), *own, *options, f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        wait_for_exit(process, 60)


def ask(address: str, what: str, **parameters: object) -> Any:
    """The `data` of an answer of Prometheus's HTTP API.

    Raises:
        ClusterError: Prometheus refuses the request; the message has its reason.
        OSError: Prometheus does not answer, as while it starts.
    """
    url = f"http://{address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        raise ClusterError(f"{parameters}: {error.read().decode()}") from error


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """Series of an instant query; empty while Prometheus starts or has no sample."""
    try:
        found: list[dict[str, Any]] = ask(address, "query", query=expression)["result"]
    except OSError:
        return []
    return found
