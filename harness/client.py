"""A minimal Kubernetes API client on the standard library, for what the harness itself asks of its
API server.

Not for the operator or its tests: it knows nothing but one JSON request at a time. One connection
is kept per object, on which threads take turns.
"""

import http.client
import json
import ssl
import threading
import time
from typing import Any

from .pki import Authority

STRATEGIC_MERGE = "application/strategic-merge-patch+json"
ANSWER_SECONDS = 90.0
"""Longest wait for an answer. The API server ends each request itself after 60 s (its flag
--request-timeout), so that a shorter wait would take a starved machine for a dead server."""
IDLE_SECONDS = 60.0
"""After so long without a request a new connection is opened. The API server closes one that is
idle for 90 s (k8s.io/apiserver, pkg/server/secure_serving.go), and a request on it would fail."""


class ApiStatusError(OSError):
    """The API server answered with an error status; an OSError, so that `until` takes it as not
    yet."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{method} {path}: {status} {text.strip()}")
        self.status = status


class ApiClient:
    """Requests to `address:port` as the client `name` of the authority."""

    def __init__(self, address: str, port: int, authority: Authority, name: str = "admin") -> None:
        self._context = ssl.create_default_context(cafile=str(authority.crt("ca")))
        self._context.load_cert_chain(authority.crt(name), authority.key(name))
        self._address = (address, port)
        self._connection = self.connection()
        self._used_at = time.monotonic()
        self._turn = threading.Lock()

    def connection(self, timeout: float = ANSWER_SECONDS) -> http.client.HTTPSConnection:
        """A connection of its own, for an answer that is read as it comes, such as a watch's."""
        return http.client.HTTPSConnection(*self._address, timeout=timeout, context=self._context)

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> Any:
        """Return the answer (parsed if it is a JSON object, else text).

        Raises ApiStatusError on a status of 400 or more, OSError when the server can't be reached.
        """
        data = None if body is None else json.dumps(body)
        with self._turn:
            status, text = self._answer(method, path, data, {"Content-Type": kind})
        if status >= 400:
            raise ApiStatusError(method, path, status, text)
        return json.loads(text) if text.startswith("{") else text

    def _answer(
        self, method: str, path: str, data: str | None, headers: dict[str, str]
    ) -> tuple[int, str]:
        if time.monotonic() - self._used_at > IDLE_SECONDS:
            self._connection.close()  # the next request opens a new one
        try:
            self._connection.request(method, path, data, headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            self._used_at = time.monotonic()

    def get(self, path: str) -> Any:
        """GET a path."""
        return self.request("GET", path)
