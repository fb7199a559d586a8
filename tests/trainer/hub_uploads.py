"""The half of the stand-in hub that is written to: repositories, large files in parts, commits, and
who may do so.

Written to what huggingface_hub 2.4.0 sends and reads (create_repo, auth_check, preupload_lfs_files,
lfs_upload and _send_commit) where HF_HUB_DISABLE_XET is set. What only the real hub has is not
here: xet, quotas, scans, redirects.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from grpo_api.text.contract import EXPORT_TOKEN_ENV
from tests.trainer.hub import LARGE, Answer, Files, HubServer, Repository, serving, use

PART_BYTES = 20_000
"""Large files of more bytes are sent in parts of so many."""
FIRST_COMMIT = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
WRITER, READER = "hf_writes", "hf_reads"
"""Tokens that may write to every repository, and none; all others are unknown."""


@dataclass(frozen=True)
class Request:
    """What came in."""

    method: str
    path: str
    token: str
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass
class Uploads:
    """What was sent and what became of it."""

    repositories: dict[str, Repository]
    url: Callable[[], str]
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files that arrived whole, by their sha256."""
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    before_commit: Callable[[], None] = lambda: None
    """Called when a commit has come in and is not looked at yet."""

    def respond(self, request: Request) -> Answer | None:
        """The answer to what only who writes asks; None for everything else."""
        if request.token not in ("", WRITER, READER):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        for pattern, answer in self._routes().items():
            if match := re.fullmatch(pattern, f"{request.method} {request.path}"):
                return answer(request, *match.groups())
        return self._hidden(request)

    def _routes(self) -> dict[str, Callable[..., Answer]]:
        model = r"/api/models/([^/]+/[^/]+)"
        return {
            "POST /api/repos/create": self._create,
            "POST /api/validate-yaml": self._validate,
            f"GET {model}/auth-check/write": self._may_write,
            f"POST {model}/preupload/main": self._preupload,
            f"POST {model}/commit/main": self._commit,
            r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": self._batch,
            r"POST /([^/]+/[^/]+)\.git/info/lfs/verify": self._verify,
            r"PUT /store/([0-9a-f]+)": self._put,
            r"PUT /store/([0-9a-f]+)/(\d+)": self._put_part,
            "POST /api/complete_multipart": self._complete,
        }

    def _hidden(self, request: Request) -> Answer | None:
        """A private repository is none to who has no token."""
        name = "/".join(request.path.removeprefix("/api/models").strip("/").split("/")[:2])
        found = self.repositories.get(f"models/{name}")
        return (
            (404, {"X-Error-Code": "RepoNotFound"}, b"")
            if found and found.private and not request.token
            else None
        )

    def _refusal(self, request: Request, name: str) -> Answer | None:
        if request.token != WRITER:
            return 403, {"X-Error-Message": "You don't have the rights to write to it"}, b""
        return (
            None
            if f"models/{name}" in self.repositories
            else (404, {"X-Error-Code": "RepoNotFound"}, b"")
        )

    def _create(self, request: Request) -> Answer:
        wanted = request.json
        name = f"{wanted['organization']}/{wanted['name']}"
        if request.token != WRITER:
            return _json(403, {"error": "no right"})
        if f"models/{name}" in self.repositories:
            return _json(
                409, {"error": "You already created this model repo", "url": f"{self.url()}/{name}"}
            )
        made = self.repositories[f"models/{name}"] = Repository("model", uploaded=True)
        made.private = wanted["visibility"] == "private"
        _extend(made, FIRST_COMMIT)
        return _json(200, {"url": f"{self.url()}/{name}"})

    def _validate(self, request: Request) -> Answer:
        match = re.match(r"---\n(.*?)\n---\n", request.json["content"], re.DOTALL)
        problem = "" if match and isinstance(yaml.safe_load(match[1]), dict) else "no metadata"
        return _json(
            400 if problem else 200,
            {"errors": [{"message": problem}] if problem else [], "warnings": []},
        )

    def _may_write(self, request: Request, name: str) -> Answer:
        return self._refusal(request, name) or (200, {"Content-Type": "text/plain"}, b"OK")

    def _preupload(self, request: Request, name: str) -> Answer:
        if refusal := self._refusal(request, name):
            return refusal
        found = self.repositories[f"models/{name}"]
        ignored = found.commits[found.main].get(".gitignore", b"").decode().split()
        answers = [
            {
                "path": (path := file["path"]),
                "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                "shouldIgnore": path in ignored,
                "oid": _oid(path, found.commits[found.main]),
            }
            for file in request.json["files"]
        ]
        return _json(200, {"files": answers})

    def _batch(self, request: Request, name: str) -> Answer:
        if refusal := self._refusal(request, name):
            return refusal
        objects = [
            {"oid": one["oid"], "size": one["size"]}
            | (
                {}
                if one["oid"] in self.objects
                else {"actions": self._actions(name, one["oid"], one["size"])}
            )
            for one in request.json["objects"]
        ]
        return (
            200,
            {"Content-Type": "application/vnd.git-lfs+json"},
            json.dumps({"objects": objects}).encode(),
        )

    def _actions(self, name: str, oid: str, size: int) -> dict[str, Any]:
        store, verify = (
            f"{self.url()}/store/{oid}",
            {"href": f"{self.url()}/{name}.git/info/lfs/verify"},
        )
        if size <= PART_BYTES:
            return {"upload": {"href": store}, "verify": verify}
        parts = {
            str(number): f"{store}/{number}" for number in range(1, -(-size // PART_BYTES) + 1)
        }
        upload = {
            "href": f"{self.url()}/api/complete_multipart",
            "header": {"chunk_size": str(PART_BYTES), **parts},
        }
        return {"upload": upload, "verify": verify}

    def _put(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != oid:
            return 400, {}, b"<Error>other content</Error>"
        self.objects[oid] = request.body
        return 200, {"ETag": '"whole"'}, b""

    def _put_part(self, request: Request, oid: str, number: str) -> Answer:
        self.parts.setdefault(oid, {})[int(number)] = request.body
        return (
            200,
            {"ETag": f'"{hashlib.md5(request.body, usedforsecurity=False).hexdigest()}"'},
            b"",
        )

    def _complete(self, request: Request) -> Answer:
        oid, parts = request.json["oid"], self.parts.get(request.json["oid"], {})
        content = b"".join(parts[one["partNumber"]] for one in request.json["parts"])
        answer = self._put(Request("PUT", request.path, request.token, content), oid)
        return answer if answer[0] != 200 else (200, {"Content-Type": "text/plain"}, b"OK")

    def _verify(self, request: Request, name: str) -> Answer:
        stored = self.objects.get(request.json["oid"])
        return self._refusal(request, name) or _json(200 if stored is not None else 404, {})

    def _commit(self, request: Request, name: str) -> Answer:
        if refusal := self._refusal(request, name):
            return refusal
        self.before_commit()
        found = self.repositories[f"models/{name}"]
        header, *operations = (json.loads(line) for line in request.body.splitlines())
        if header["value"].get("parentCommit", found.main) != found.main:
            return _json(
                412, {"error": "A commit has happened since. Please refresh and try again."}
            )
        files, problem = self._applied(operations, dict(found.commits[found.main]))
        if problem:
            return _json(400, {"error": problem})
        oid = _extend(found, files)
        return _json(
            200,
            {"success": True, "commitOid": oid, "commitUrl": f"{self.url()}/{name}/commit/{oid}"},
        )

    def _applied(self, operations: list[dict[str, Any]], files: Files) -> tuple[Files, str]:
        for one in operations:
            key, value = one["key"], one["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile" and value["oid"] in self.objects:
                files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile" and value["path"] in files:
                del files[value["path"]]
            else:
                return files, f"{key} {value['path']} is not there"
        return files, ""


def _extend(repository: Repository, files: Files) -> str:
    """A commit on top of the branch, with exactly these files."""
    digest = hashlib.sha1(repository.main.encode(), usedforsecurity=False)
    for name, content in sorted(files.items()):
        digest.update(name.encode() + content)
    repository.main = digest.hexdigest()
    repository.commits[repository.main] = dict(files)
    return repository.main


def _oid(path: str, files: Files) -> str | None:
    if path not in files:
        return None
    if path.endswith(LARGE):
        return hashlib.sha256(files[path]).hexdigest()
    return hashlib.sha1(
        b"blob %d\0" % len(files[path]) + files[path], usedforsecurity=False
    ).hexdigest()


def _json(status: int, answer: Any) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(answer).encode()


class WritableHub(HubServer):
    """A hub with the half that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = Uploads(self.repositories, lambda: self.url)

    def written(self, method: str, path: str, token: str, body: bytes) -> Answer | None:
        """One at a time, as the hub does for a repository."""
        with self.lock:
            return self.uploads.respond(Request(method, path, token, body))


@contextmanager
def writable_hub_in_use(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[WritableHub]:
    """An empty hub that this process uses, with an empty cache and a token that may write."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv(EXPORT_TOKEN_ENV, WRITER)
    with serving(WritableHub()) as server:
        use(monkeypatch, server.url, cache)
        yield server
