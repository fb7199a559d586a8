"""Prometheus and promtool, from Debian's package without installing it: what metrics and alerts are
put to.

Only Prometheus knows whether it can read what we write.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import yaml

from ..controlplane import free_port
from . import debian
from .processes import ClusterError, run, server_process

SECONDS = 60.0
"""Longest wait for an answer."""


def program(name: str) -> Path:
    """Path of `prometheus` or `promtool`, of Debian's package (20 MB)."""
    return debian.program("prometheus", name)


@contextmanager
def serving(folder: Path, settings: dict[str, Any], *options: str) -> Iterator[str]:
    """A Prometheus with these settings, which keeps what it scrapes in the folder's `data`; yields
    its address once it answers queries."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    own = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [program("prometheus"), *own, *options, f"--web.listen-address={address}"]
    with server_process("prometheus", command, folder, Request(f"http://{address}/-/ready")):
        yield address


@contextmanager
def filled(folder: Path, text: str) -> Iterator[str]:
    """A Prometheus in this folder that has a past: what the OpenMetrics text says, with its times.
    Yields its address."""
    world = folder / "world.txt"
    world.write_text(text)
    run(program("promtool"), "tsdb", "create-blocks-from", "openmetrics", world, folder / "data")
    options = (
        "--storage.tsdb.retention.time=100y",
        "--query.lookback-delta=1m",  # text can't say that a series has ended, as scrapes do
    )
    with serving(folder, {}, *options) as address:
        yield address


def ask(address: str, what: str, **parameters: object) -> Any:
    """The `data` of an answer of Prometheus's HTTP API.

    Raises:
        ClusterError: Prometheus refuses the request; the message has its reason.
        OSError: it gives no answer now, as where a query takes it too long.
    """
    url = f"http://{address}/api/v1/{what}?{urlencode(parameters)}"
    try:
        with urlopen(url, timeout=SECONDS) as answer:
            return json.load(answer)["data"]
    except HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        raise ClusterError(f"{parameters}: {error.read().decode()}") from error


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """Series of an instant query; empty while Prometheus has no sample."""
    found: list[dict[str, Any]] = ask(address, "query", query=expression)["result"]
    return found
