"""Pushes an exported model to a repository of the hub: in one commit, proven by the hashes of its
files.

A commit is whole or not there, so nobody ever sees half a model. Before each try the repository is
looked at. A lost answer, and an attempt that ended after its push, are settled by what is there,
and not pushed twice. The function upload_folder of huggingface_hub is not used, since it makes
several commits of a large folder.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    is_offline_mode,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoFile
from huggingface_hub.utils.sha import git_hash

from grpo_api.provenance.provenance import OWN_FILES
from grpo_api.report.artifacts import files_of, sha256_digests
from grpo_api.spec.checkpoint import HubExportSpec
from grpo_api.text.clock import Clock
from grpo_api.text.contract import EXPORT_TOKEN_ENV

from ..runtime.clock import LONGEST_WAIT, SYSTEM_CLOCK, OnWait, ignore_wait
from ..runtime.errors import BadInput
from .retry import (
    Arrivals,
    ReportByteCount,
    TryLater,
    answer_message,
    answers_of_the_hub,
    bytes_in,
    retry_passing_errors,
    watch_arrivals,
)

ONLY_COPY_SECONDS = 86400.0
"""Longest wait for a hub that takes nothing, while the model is nowhere else."""
MOST_TIMES = 3
"""How often as many bytes as the export has may go out and count as progress: a file that breaks
off begins again."""
ANSWER_SECONDS = 300.0
"""Longest wait for one answer: a commit of many files takes the hub its time."""
FILES_AT_A_TIME = 5
"""Weight files that are sent together; huggingface_hub has as many threads."""
REPLACED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*_model*.bin",
    "*_model.bin.index.json",
    "adapter_config.json",
    *OWN_FILES,
)
"""Files at the top of the repository that are deleted if our export has no file of that name. An
earlier model left them: they would be loaded with ours or in its place, or describe ours wrongly.
"""
FOR_GOOD = ("LFS batch API returned errors", "Invalid metadata in README.md")
"""What huggingface_hub's ValueErrors begin with where the hub has understood what it refuses."""
TOKEN = "spec.export.hub.tokenSecretRef"
CONFLICTS = frozenset({409, 412})
"""The hub's answers when the branch has moved since it was looked at."""


@dataclass(frozen=True, slots=True)
class Target:
    """The repository that is pushed to, and the right to do so."""

    spec: HubExportSpec
    token: str

    @classmethod
    def from_spec(cls, spec: HubExportSpec) -> "Target":
        """The target of `spec`, with the token from the environment.

        Raises:
            BadInput: there is no token, or HF_HUB_OFFLINE forbids requests.
        """
        token = os.environ.get(EXPORT_TOKEN_ENV, "").strip()
        if not token:
            secret = spec.token_secret_ref
            raise BadInput(
                f"the Secret of {TOKEN} ({secret.name}, key {secret.key}) "
                "has no token; put one with the right to write into it"
            )
        if is_offline_mode():
            raise BadInput(
                "spec.export.to is Hub, but HF_HUB_OFFLINE says that no hub may be asked: remove "
                "one of both"
            )
        return cls(spec, token)

    @property
    def description(self) -> str:
        """The repository, for messages."""
        return f"spec.export.hub.repository: {self.spec.repository}"

    def api(self) -> HfApi:
        """The client."""
        return HfApi(token=self.token)


class Sending(Arrivals):
    """What the hub was sent."""

    def __init__(
        self,
        report: ReportByteCount,
        clock: Clock,
        longest_wait: float = LONGEST_WAIT,
        on_wait: OnWait = ignore_wait,
        *,
        most_bytes: int = 0,
    ) -> None:
        """Bytes beyond `most_bytes` are no progress."""
        # hf_xet would keep in this folder what it needs room for.
        super().__init__([Path(constants.HF_HOME)], report, clock, on_wait, longest_wait)
        self._bytes, self._most_bytes = 0, most_bytes

    def count_sent(self, count: int) -> None:
        """Add sent bytes. Two threads at once may lose a part of the count, which serves only as a
        sign of life."""
        self._bytes += count

    def measure(self) -> int:
        """Bytes that went out, as far as they are progress."""
        return min(self._bytes, self._most_bytes)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of an export: path in the repository → path here, and their sha256 in hex."""

    paths: Mapping[str, Path]
    hashes: Mapping[str, str]

    @classmethod
    def from_folder(cls, folder: Path, on_read: Callable[[], None]) -> "Files":
        """The files of a folder; `on_read` is called as they are read."""
        paths = {name: path for name, path in files_of(folder).items() if path.is_file()}
        return cls(paths, sha256_digests(paths, lambda _: on_read()))

    def additions(self) -> list[CommitOperationAdd]:
        """What is to be in the commit; new ones each time, since they remember what was in the
        repository."""
        additions = []
        for name, path in self.paths.items():
            additions.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path))
            additions[-1].upload_info.sha256 = bytes.fromhex(self.hashes[name])
        return additions

    def differing_names(self, remote_files: Mapping[str, RepoFile]) -> list[str]:
        """Names of files that the repository has not, or has with other content."""
        return [name for name in self.paths if not self._is_same_file(name, remote_files.get(name))]

    def _is_same_file(self, name: str, file: RepoFile | None) -> bool:
        if file is None:
            return False
        if file.lfs is not None:
            return file.lfs.sha256 == self.hashes[name]
        if self.paths[name].stat().st_size != file.size:
            return False
        # git's name of a small file: a hash of its content, too
        return file.blob_id == git_hash(self.paths[name].read_bytes())


def require_target(
    spec: HubExportSpec,
    report: ReportByteCount,
    clock: Clock = SYSTEM_CLOCK,
    on_wait: OnWait = ignore_wait,
    longest_wait: float = LONGEST_WAIT,
) -> None:
    """Make sure, before anything is trained, that the model can be pushed; a repository that is
    missing is created. `longest_wait`: seconds for which a hub without an answer is waited for.

    Raises:
        BadInput: the token is refused or may not write, or the repository is public and should be
            private.
        HubUnavailable: the hub can't be asked.
    """
    # As in `push_folder`: only a run that pushes needs the hub's client.
    from .hub_client import require_sendable, use_client

    target, sending = Target.from_spec(spec), Sending(report, clock, longest_wait, on_wait)
    require_sendable(target.token, TOKEN)
    with use_client(), watch_arrivals(sending), _translated_refusals(target):
        retry_passing_errors(lambda: _prepare_repository(target), target.description, sending)


def push_folder(
    folder: Path,
    spec: HubExportSpec,
    message: str,
    report: ReportByteCount,
    *,
    is_only_copy: bool,
    clock: Clock = SYSTEM_CLOCK,
    on_wait: OnWait = ignore_wait,
) -> str:
    """Push the files of a folder; return the commit that contains each of them with its local hash.

    `message` is the commit's first line. `report` is called with the bytes that went out, as a sign
    of work. Where it `is_only_copy`, the hub is waited for much longer.

    Raises:
        BadInput: the hub refuses it for good.
        HubUnavailable: the hub took nothing for too long.
    """
    from .hub_client import require_sendable, use_client

    target = Target.from_spec(spec)
    longest_wait = ONLY_COPY_SECONDS if is_only_copy else LONGEST_WAIT
    most_bytes = MOST_TIMES * bytes_in(folder)
    sending = Sending(report, clock, longest_wait, on_wait, most_bytes=most_bytes)
    files = Files.from_folder(folder, sending.report_again)
    require_sendable(target.token, TOKEN)
    client = use_client(sending.count_sent, ANSWER_SECONDS)
    with client, watch_arrivals(sending), _translated_refusals(target):
        push_once = partial(_push_once, target, files, message)
        return retry_passing_errors(push_once, target.description, sending)


@contextmanager
def _translated_refusals(target: Target) -> Iterator[None]:
    """What the hub refuses for good is bad input."""
    try:
        yield
    except HfHubHTTPError as error:
        raise BadInput(f"{target.description} can't be written: {_reason(error)}") from error
    except HFValidationError as error:
        raise BadInput(f"{target.description} is no name of a repository: {error}") from error


def _reason(error: HfHubHTTPError) -> str:
    """The hub's refusal with what mends it."""
    status = error.response.status_code
    if status == 401:
        return (
            "the hub doesn't know the token (HTTP 401); put a valid one into the Secret of "
            "tokenSecretRef"
        )
    if status in (403, 404) or isinstance(error, RepositoryNotFoundError):
        return (
            f"the token has no right to write there ({answer_message(error)}); give it the role "
            "write, or as a fine-grained token the right to write to this repository and to create "
            "it, or name a namespace of its user"
        )
    return answer_message(error)


@answers_of_the_hub()
def _prepare_repository(target: Target) -> ModelInfo:
    """The repository, created if it is missing, writable, and private if it should be."""
    api, spec = target.api(), target.spec
    try:
        info = api.model_info(spec.repository)
    except RepositoryNotFoundError:
        api.create_repo(spec.repository, private=spec.private, exist_ok=True)
        info = api.model_info(spec.repository)
    if spec.private and not info.private:
        raise BadInput(
            f"{target.description} is public on the hub, and export.hub.private is true: make the "
            "repository private, name another one, or set private to false"
        )
    api.auth_check(spec.repository, write=True)
    return info


@answers_of_the_hub()
def _push_once(target: Target, files: Files, message: str) -> str:
    """One try: the commit that has the files, which may be there already."""
    api, head = target.api(), _prepare_repository(target).sha
    there = _tree(target, head)
    deletions = [CommitOperationDelete(name) for name in _outdated_files(files, there)]
    if head and not deletions and not files.differing_names(there):
        return head
    additions = files.additions()
    repository = target.spec.repository
    weights = [each for each in additions if each.path_in_repo.endswith(".safetensors")]
    with _next_time_better():
        for first in range(0, len(weights), FILES_AT_A_TIME):
            some = weights[first : first + FILES_AT_A_TIME]
            api.preupload_lfs_files(repository, additions=some)
        commit = api.create_commit(
            repository, [*deletions, *additions], commit_message=message, parent_commit=head or None
        )
    try:
        differing = files.differing_names(_tree(target, commit.oid))
    except HfHubHTTPError as error:
        # Another server of the hub than that which took the commit may not know of it yet.
        if error.response.status_code == 404:
            raise TryLater(f"commit {commit.oid} is not there yet") from error
        raise
    if differing:
        raise BadInput(
            f"{target.description}: commit {commit.oid} has not the exported "
            f"{', '.join(differing)}; a .gitignore in the repository may leave files out: remove "
            "it, or name another repository"
        )
    return commit.oid


@contextmanager
def _next_time_better() -> Iterator[None]:
    """Surrounds an upload, and raises TryLater where the branch has moved, a file's upload link has
    expired, or the answer is not the hub's. The next try reads the repository again."""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code in CONFLICTS:
            raise TryLater("the branch has moved meanwhile") from error
        raise
    # huggingface_hub's, around what the upload of one file failed with.
    except RuntimeError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise TryLater(f"{error} {answer_message(error.__cause__)}") from error
        raise
    except ValueError as error:
        if str(error).startswith(FOR_GOOD):
            raise BadInput(f"the hub takes no such file: {error}") from error
        raise TryLater(f"{type(error).__name__}: {error}") from error


def _tree(target: Target, commit: str | None) -> dict[str, RepoFile]:
    """The files of a commit by their paths; none before the first."""
    if commit is None:
        return {}
    entries = target.api().list_repo_tree(target.spec.repository, recursive=True, revision=commit)
    return {file.path: file for file in entries if isinstance(file, RepoFile)}


def _outdated_files(files: Files, there: Mapping[str, RepoFile]) -> list[str]:
    """Files of a model that was there before, and would be taken for a part of ours."""
    outdated: list[str] = []
    for name in there:
        if "/" in name or name in files.paths:
            continue
        if any(fnmatchcase(name, pattern) for pattern in REPLACED):
            outdated.append(name)
    return outdated
