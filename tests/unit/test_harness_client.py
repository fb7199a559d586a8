"""The harness's API client opens a new connection before the server closes an idle one."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness import client as module
from harness.client import IDLE_SECONDS, ApiClient

SERVER_CLOSES = 90.0
"""Seconds after which a Kubernetes API server closes an idle connection."""


class Connection:
    """A connection to a server that closes it when it has been idle for too long."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self._clock, self._last, self.opened = clock, clock.now, 1

    def request(self, *_: Any) -> None:
        """Fails on a connection that the server has closed."""
        if self._clock.now - self._last > SERVER_CLOSES:
            raise OSError("EOF occurred in violation of protocol")
        self._last = self._clock.now

    def getresponse(self) -> SimpleNamespace:
        """An empty object."""
        return SimpleNamespace(status=200, read=lambda: b"{}")

    def close(self) -> None:
        """The next request opens a new one."""
        self._last, self.opened = self._clock.now, self.opened + 1


@pytest.mark.parametrize("idle", [0.0, IDLE_SECONDS, IDLE_SECONDS + 1, SERVER_CLOSES + 1, 1e6])
def test_a_request_after_a_pause_meets_an_open_connection(
    idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    context = SimpleNamespace(load_cert_chain=lambda *_: None)
    monkeypatch.setattr("ssl.create_default_context", lambda **_: context)
    connection = Connection(clock)
    monkeypatch.setattr(ApiClient, "connection", lambda _: connection)
    authority: Any = SimpleNamespace(crt=str, key=str)
    client = ApiClient("127.0.0.1", 1, authority)
    client.get("/api")
    clock.now += idle
    assert client.get("/api") == {}
    assert connection.opened == (2 if idle > IDLE_SECONDS else 1)
