"""A hub of our own on a loopback port: repositories with commits, as the real clients ask for them,
and faults.

The real clients meet it over HTTP. What it answers follows from the routes that they use: an API
with JSON, files with `ETag` and `X-Repo-Commit`, and `X-Error-Code` beside a 404 (huggingface_hub's
hf_raise_for_status). It imports nothing but the standard library, so that a pod can be one, too.
Who writes meets hub_uploads.py.
"""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import pytest

Files = dict[str, bytes]
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""
LARGE = ".safetensors"
"""What the names of files end with that are kept beside a repository, known by their sha256."""
PASSING = (
    "500",
    "502",
    "503",
    "504",
    "408",
    "429",
    "429 later",
    "no answer",
    "half",
    "short",
    "page",
)
"""Faults that the next request need not meet: refusals, a connection that is cut before or amid the
answer, a file of another size than announced, a proxy's page."""
LOST = "lost"
"""A fault of requests that write: it is carried out, and nobody is told."""
FOR_GOOD = ("401", "403", "404", "400")
"""Refusals that the next request would get too."""


@dataclass
class Repository:
    """A repository: its branches, and the files of each commit."""

    kind: str
    main: str = ""
    commits: dict[str, Files] = field(default_factory=dict)
    private: bool = False
    uploaded: bool = False
    """Whether it came to be by uploads, so that large files are told by their sha256, too."""

    def push(self, files: Files) -> str:
        """A new commit with these files, to which `main` moves."""
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        self.main = digest.hexdigest()
        self.commits[self.main] = dict(files)
        return self.main


class HubServer(ThreadingHTTPServer):
    """The repositories, what was asked of them, and the faults that are still to come."""

    daemon_threads = True

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__((host, port), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults: list[str] = []
        """One is used up per request, the first first; an empty one lets the request pass."""
        self.held = ""
        """Requests with this in their path get no answer, until `release`."""
        self.trickling = ""
        """Requests with this in their path get 20 bytes per second."""
        self.requests: list[str] = []
        """`GET /path` of every request."""
        self.change: Callable[[str, Answer], Answer] = lambda _, answer: answer
        """What becomes of the answer to a request such as `GET /path`."""
        self.lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Whoever is held gets an answer."""
        self.held = ""
        self._released.set()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, kind: str, name: str, files: Files) -> str:
        """A commit of a model or dataset; the repository is made if it is new."""
        return self.repositories.setdefault(f"{kind}s/{name}", Repository(kind)).push(files)

    def written(self, method: str, path: str, token: str, body: bytes) -> Answer | None:
        """The answer to a request that only who writes makes; None for others. Here nobody may
        write."""

    def fault(self, request: str) -> str:
        """Takes note of a request; the fault that it is to meet."""
        with self.lock:
            self.requests.append(request)
            fault = self.faults.pop(0) if self.faults else ""
        if self.held and self.held in request:
            # Not at the top: as a pod's file this module has nothing but Python beside it.
            from harness.programs.patience import wait_for_event

            wait_for_event(self._released, 60)
        return fault

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error here."""


S = TypeVar("S", bound=ThreadingHTTPServer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        """Only the headers."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """An API's answer, or a file."""
        self._answer(body=True)

    def do_POST(self) -> None:
        """paths-info of the API, and all that writes."""
        self._answer(body=True, sent=self._sent())

    def do_PUT(self) -> None:
        """A large file, or a part of one."""
        self._answer(body=True, sent=self._sent())

    def _sent(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, *, body: bool, sent: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.server.fault(f"{self.command} {path}")
        if fault in ("no answer", "page") or fault[:3].isdigit():
            self._refuse(fault)
            return
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        written = self.server.written(self.command, path, token, sent)
        answer = written or _respond(self.server.repositories, path, sent)
        status, headers, content = self.server.change(f"{self.command} {path}", answer)
        if fault == LOST:
            self.close_connection = True
            return
        start = int(self.headers.get("range", "bytes=0-")[6:].split("-")[0])
        if start:
            status, headers = (
                206,
                headers | {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"},
            )
        content = content[start:]
        if fault == "short" and body:
            content = content[: len(content) // 2]
        self._send(status, headers, content, body=body, cut=fault == "half")

    def _refuse(self, fault: str) -> None:
        """A fault instead of an answer."""
        if fault == "no answer":
            self.close_connection = True
        elif fault == "page":
            self._send(200, {"Content-Type": "text/html"}, b"<html>please log in</html>", body=True)
        else:
            codes = {"404": "RepoNotFound", "401": "GatedRepo", "403": "GatedRepo"}
            waits = {"429 later": "2", "429 in an hour": "3600"}
            headers = (
                {"Retry-After": waits[fault]}
                if fault in waits
                else {"X-Error-Code": codes.get(fault, "")}
            )
            self._send(int(fault[:3]), headers, b"", body=True)

    def _send(
        self, status: int, headers: dict[str, str], content: bytes, *, body: bool, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.server.trickling and self.server.trickling in self.path:
            for place in range(len(content)):
                self.wfile.write(content[place : place + 1])
                time.sleep(0.05)
        elif body and not cut:
            self.wfile.write(content)
        elif body:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


def _respond(
    repositories: dict[str, Repository], path: str, sent: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for a path."""
    api = path.startswith("/api/")
    name, _, rest = path.removeprefix("/api").strip("/").partition("/resolve/")
    if not api:
        name = name if name.startswith("datasets/") else f"models/{name}"
    parts = name.split("/")
    found = repositories.get("/".join(parts[:3]))
    if found is None:
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    if not api:
        revision, _, file = rest.partition("/")
        return _file(found, revision, file)
    what, revision = parts[3] if parts[3:] else "revision", parts[4] if parts[4:] else "main"
    commit = found.main if revision == "main" else revision
    if commit not in found.commits:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    return (
        200,
        {"Content-Type": "application/json"},
        json.dumps(_info(found, what, commit, name, sent)).encode(),
    )


def _file(repository: Repository, revision: str, name: str) -> tuple[int, dict[str, str], bytes]:
    commit = repository.main if revision == "main" else revision
    if commit not in repository.commits:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    content = repository.commits[commit].get(name)
    if content is None:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
    return (
        200,
        {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"},
        content,
    )


def _info(stored: Repository, what: str, commit: str, name: str, sent: bytes) -> Any:
    files = stored.commits[commit]
    if what == "tree":
        below = "/".join(name.split("/")[5:])
        names = [file for file in files if file.startswith(below)]
    elif what == "paths-info":
        asked = json.loads(sent)["paths"]
        names = [file for file in files if file in asked]
    elif what == "refs":
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": stored.main}
        return {"branches": [main], "converts": [], "tags": []}
    else:
        repository = "/".join(name.split("/")[1:3])
        siblings = [{"rfilename": file} for file in files]
        return {"id": repository, "sha": commit, "private": stored.private, "siblings": siblings}
    return [_entry(stored, name, files[name]) for name in sorted(names)]


def _entry(repository: Repository, name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": _blob(content),
    }
    if repository.uploaded and name.endswith(LARGE):
        entry["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 134,
        }
    return entry


def _blob(content: bytes) -> str:
    """git's name for a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server(port: int = 0) -> Iterator[HubServer]:
    """The hub, for as long as the body runs."""
    with serving(HubServer(port)) as server:
        yield server


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Serves while the body runs."""
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of(folder: Path) -> Files:
    """The files of a folder, as a commit has them."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def environment(url: str, cache: Path) -> dict[str, str]:
    """Variables with which a process uses this hub and that cache."""
    return {
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_DATASETS_CACHE": str(cache / "datasets"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def use(monkeypatch: "pytest.MonkeyPatch", url: str, cache: Path) -> None:
    """The same for this process, whose libraries have read their environment already."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
