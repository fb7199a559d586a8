"""A real Prometheus that has a past: filled from text, then asked by HTTP, as Grafana asks it."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .programs.processes import run, until
from .programs.prometheus import SECONDS, ask, program, serving

OPTIONS = (
    "--storage.tsdb.retention.time=100y",
    "--query.lookback-delta=1m",  # text can't say that a series has ended, as scrapes do
)


class Prometheus:
    """One that answers queries over what was put into it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, what: str, **parameters: object) -> Any:
        """The data of an answer; a refused query raises ClusterError with what Prometheus says of
        it."""
        return ask(self.address, what, **parameters)

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=SECONDS):
                return True
        except OSError:
            return False


@contextmanager
def filled(folder: Path, text: str) -> Iterator[Prometheus]:
    """A Prometheus in this folder that holds what the OpenMetrics text tells, with its times."""
    (folder / "world.txt").write_text(text)
    world, data = folder / "world.txt", folder / "data"
    run(program("promtool"), "tsdb", "create-blocks-from", "openmetrics", world, data)
    with serving(folder, {}, *OPTIONS) as address:
        server = Prometheus(address)
        until("Prometheus", server.ready, SECONDS)
        yield server
