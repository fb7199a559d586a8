"""The HTTP client that huggingface_hub and datasets use here: it says at once, and in one way, what
may pass.

Left alone, they take a 503 for a file that doesn't exist, and go on without a file that could not
be requested. They also wait for minutes without a line in the log. Here such an answer is an
exception that neither of them knows, so that none of them handles it. It ends the whole call, and
retry.py makes it again.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory, hf_request_event_hook

from grpo_api.report.artifacts import ReportBytes
from grpo_api.text.clock import requested_pause

from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import BadInput
from .retry import LEAST_BYTES, TryLater

ANSWER_SECONDS = 30.0
"""Longest wait for one answer where huggingface_hub sets none."""
ANY_ANSWER = ("/auth-check", "/complete_multipart")
"""Parts of the API's paths where no kind of answer is documented, so that only a page is taken for
a proxy's."""
PASSING_STATUSES = frozenset({408, 425, 429})
"""Refusals that the same request may not get again, as none that says 5xx (RFC 9110, section
15)."""


class _CountingStream(httpx2.SyncByteStream):
    """A request's body that tells what has gone out: one file may take longer than silence is
    believed."""

    def __init__(self, body: httpx2.SyncByteStream, sent: ReportBytes) -> None:
        self._body, self._sent = body, sent

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._body:
            yield piece
            self._sent(len(piece))

    def close(self) -> None:
        self._body.close()


class _PacedStream(httpx2.SyncByteStream):
    """An answer's body that fails where it comes too slowly ever to end, although bytes come."""

    def __init__(self, body: httpx2.SyncByteStream, where: str, seconds: float) -> None:
        self._body, self._where, self._seconds = body, where, seconds

    def __iter__(self) -> Iterator[bytes]:
        pieces, waited, received = iter(self._body), 0.0, 0
        while True:
            # The time of who writes the pieces to a disk is not the hub's.
            asked_at = SYSTEM_CLOCK.now()
            piece = next(pieces, None)
            waited += SYSTEM_CLOCK.now() - asked_at
            if piece is None:
                return
            received += len(piece)
            if waited > self._seconds:
                if received < LEAST_BYTES:
                    raise TryLater(f"{self._where}: only {received} bytes in {waited:.0f} s")
                waited, received = 0.0, 0
            yield piece

    def close(self) -> None:
        self._body.close()


class Client(httpx2.Client):
    """An HTTP client that raises TryLater instead of returning what says so."""

    def __init__(
        self,
        on_sent: ReportBytes | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        **options: Any,
    ) -> None:
        """`on_sent` is called with the bytes of each part of a file that goes out, in the thread
        that sends it. `answer_seconds`: longest wait of a request that has no limit."""
        super().__init__(**options)
        self._sent = on_sent
        self._answer_seconds = answer_seconds
        self.event_hooks["response"] = [self._pace]

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """One request with its redirects.

        Raises:
            TryLater: no answer, one that may pass, or a page where the API's JSON should be.
        """
        timeouts = request.extensions.get("timeout", {})
        unset = {kind: self._answer_seconds for kind, seconds in timeouts.items() if not seconds}
        request.extensions["timeout"] = {**timeouts, **unset}
        where = _request_text(request)
        # A file that is taken is not sent again, but a commit's own body is at every try: counted,
        # it would pass for progress for ever.
        sent = self._sent if request.method == "PUT" else None
        if sent and isinstance(request.stream, httpx2.SyncByteStream):
            request.stream = _CountingStream(request.stream, sent)
        try:
            response = super().send(request, **options)
        except httpx2.RequestError as error:
            raise TryLater(f"{where}: {type(error).__name__}: {error}") from error
        problem = _problem(request, response)
        if problem:
            response.close()
            raise TryLater(f"{where}: {problem}", requested_pause(response.headers, math.inf))
        return response

    def _pace(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.SyncByteStream)
        where = _request_text(response.request)
        response.stream = _PacedStream(response.stream, where, self._answer_seconds)


def _request_text(request: httpx2.Request) -> str:
    """Method and URL without user and query, either of which may hold a secret."""
    url = request.url
    return f"{request.method} {url.scheme}://{url.netloc.decode()}{url.path}"


def _problem(request: httpx2.Request, response: httpx2.Response) -> str:
    """The reason why a response is not the hub's answer; empty if it is."""
    if response.status_code >= 500 or response.status_code in PASSING_STATUSES:
        return f"HTTP {response.status_code} {response.reason_phrase}"
    if response.status_code == 403 and _is_of_a_link(response):
        # The next try asks the hub for another one.
        return f"{response.url.host} refuses it (HTTP 403): the link has expired, or a proxy does"
    kind, path = response.headers.get("content-type", ""), request.url.path
    if response.status_code == 409 and path.endswith("/repos/create"):
        response.read()
        # huggingface_hub would ask again at once, for ever.
        if "conflicting operation" in response.text:
            return "HTTP 409: another repository is being created"
    if response.is_success and _is_foreign(request, response):
        return f"an answer that is not the hub's, of type {kind or 'unknown'}: a proxy's?"
    return ""


def _is_of_a_link(response: httpx2.Response) -> bool:
    """Whether an answer is that of another host, where the hub's link leads, and not a mirror's."""
    is_hub = response.url.host == httpx2.URL(constants.ENDPOINT).host
    return not is_hub and not any(name.startswith("x-error-") for name in response.headers)


def _is_foreign(request: httpx2.Request, response: httpx2.Response) -> bool:
    """True for an answer that the hub does not give to such a request, as a proxy's page."""
    kind, path = response.headers.get("content-type", ""), request.url.path
    is_api = "/api/" in path
    if is_api and "json" not in kind and not any(part in path for part in ANY_ANSWER):
        return True
    if "html" in kind and (is_api or request.method in ("POST", "PUT")):
        return True
    # huggingface_hub takes the commit of a file from this header of the HEAD request.
    is_file_check = request.method == "HEAD" and "/resolve/" in path
    return is_file_check and "x-repo-commit" not in response.headers


def require_sendable(token: str | None, field: str) -> None:
    """Make sure that a request can be made of HF_ENDPOINT and the token in the Secret of a field.

    Raises:
        BadInput: none can.
    """
    if not constants.ENDPOINT.startswith(("http://", "https://")):
        raise BadInput(
            "HF_ENDPOINT begins with neither https:// nor http://; write the hub's whole URL"
        )
    if token and not (token.isascii() and token.isprintable()):
        raise BadInput(
            f"{field}: the token holds a line break or another character that no request takes; "
            "store the token alone in the Secret"
        )


@contextmanager
def use_client(
    on_sent: ReportBytes | None = None, answer_seconds: float = ANSWER_SECONDS
) -> Iterator[None]:
    """Make huggingface_hub, and with it datasets, use our client while the body runs. Restores the
    default afterwards. The client is the process's: one thread at a time may be in here, since both
    ends close the client that another thread may be using. Arguments are those of Client."""

    def make_client() -> Client:
        return Client(
            on_sent,
            min(answer_seconds, ANSWER_SECONDS),
            event_hooks={"request": [hf_request_event_hook]},
            follow_redirects=True,
            timeout=answer_seconds,
        )

    set_client_factory(make_client)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)
