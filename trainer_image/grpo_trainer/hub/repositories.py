"""Repositories of the hub as folders on this node: one commit on all ranks and in all attempts,
fetched once per cache.

`main` may move while a job runs. So a revision is resolved once, on rank 0, and the commit is
recorded. It comes back with the plans of later attempts, and from then on only this commit is
requested. What is there completely needs no hub.

Pods and jobs share a cache. A lease, a file beside the repository that its holder keeps changing,
says who fetches. Others wait while it changes. A holder that was killed changes nothing more, and
after a while one of the others takes over. Each measures that time by its own clock, since clocks
of nodes differ. Locks of the file system are not relied on: not every network file system has them,
and some keep those of the dead. If two hold a lease for a moment after all, a file is fetched twice
and none is damaged. The reason is that huggingface_hub writes each under a name of its own and
renames it when it is whole.
"""

import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    get_token,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import filter_repo_objects, validate_repo_id  # type: ignore[attr-defined]  # both are in __all__

from grpo_api.text.clock import Clock
from grpo_api.text.messages import error_chain

from ..gang import ranks
from ..runtime.clock import LONGEST_WAIT, POLL_SECONDS, SYSTEM_CLOCK, OnWait, ignore_wait
from ..runtime.durable_files import write_atomically
from ..runtime.errors import BadInput
from .retry import (
    Arrivals,
    ReportByteCount,
    TryLater,
    answer_message,
    answers_of_the_hub,
    bytes_in,
    is_unwritable,
    retry_passing_errors,
    watch_arrivals,
)

CONFIG_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
"""Of a model its configuration, tokenizer, remote code and the index of the weights."""
STALE_SECONDS = 60.0
"""How long a lease must stay as it is until its holder counts as dead: many times POLL_SECONDS."""


class Lease:
    """One lease, held or waited for."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = path
        self._clock = clock
        self._owner = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._beats = 0
        # A beat that ends after the release would leave a lease that nobody holds.
        self._lock = threading.Lock()

    def take(self, on_sign_of_life: Callable[[], None]) -> bool:
        """Wait for the lease and take it. Return True if an earlier holder died with it.
        `on_sign_of_life` is called whenever the present holder has shown that it lives.

        Raises:
            OSError: the folder can't be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        last_text, since, died = "", self._clock.now(), False
        while not self._create_file():
            text = _lease_text(self.path)
            if text != last_text:
                last_text, since = text, self._clock.now()
                on_sign_of_life()
            elif self._clock.now() - since >= STALE_SECONDS:
                self._remove_dead_lease(last_text)
                died = True
                continue
            self._clock.sleep(POLL_SECONDS)
        return died

    def beat(self) -> None:
        """Show that the holder lives; nothing while another holds it."""
        with self._lock:
            if self._is_ours:
                self._beats += 1
                with suppress(OSError):  # a full disk: what is fetched fails of it too, and says so
                    write_atomically(self.path, self._content())

    def release(self) -> None:
        """Give up the lease, if this process still holds it."""
        with self._lock:
            if self._is_ours:
                self.path.unlink(missing_ok=True)

    @property
    def _is_ours(self) -> bool:
        return _lease_text(self.path).startswith(f"{self._owner} ")

    def _create_file(self) -> bool:
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _content(self) -> str:
        return f"{self._owner} {self._beats}\n"

    def _remove_dead_lease(self, expected_text: str) -> None:
        """Put a dead holder's lease away. Of several that try only one gets the file; a new
        holder's is put back."""
        grave = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.rename(grave)
        except FileNotFoundError:
            return
        if _lease_text(grave) != expected_text and not self.path.exists():
            grave.rename(self.path)
        grave.unlink(missing_ok=True)


def _lease_text(path: Path) -> str:
    """The text of a lease file; empty if it does not exist or is being changed."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")
Fetch = Callable[[list[str]], Path]
"""From patterns of file names to the snapshot's folder, in which these files are now."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as the spec names it."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str | None
    """Commit, tag or branch; None for the default branch."""
    path: str
    """Path of its part of the spec, such as `rewards[0].model`: for messages, and the key of its
    commit."""
    token: str | None = None
    """Hub token; None for the environment's (HF_TOKEN)."""

    @property
    def description(self) -> str:
        """The repository, for messages."""
        return f"spec.{self.path}.name: {self.name} (revision {self.revision or 'default'})"

    @property
    def folder(self) -> Path | None:
        """The folder that the name is the path of; None for a repository of the hub."""
        path = Path(self.name)
        if path.is_absolute():
            return path
        if self.kind == "dataset":
            return None
        try:
            return path if path.is_dir() else None
        except OSError:  # No file system takes a name of that length.
            return None

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        return Path(constants.HF_HUB_CACHE) / repo_folder_name(
            repo_id=self.name, repo_type=self.kind
        )


@dataclass(frozen=True, slots=True)
class Hub:
    """The way to the hub of one attempt."""

    recorded_commits: Mapping[str, str] = field(default_factory=dict)
    """Commits that earlier attempts found, by `Repository.path`."""
    report: ReportByteCount = lambda _: None
    """Called with the bytes that have arrived during a download."""
    commits: dict[str, str] = field(default_factory=dict)
    """The commits that were found, by `Repository.path`."""
    report_total: ReportByteCount = lambda _: None
    """Called before a download with the bytes that will be there after it; 0 where nobody knows."""
    clock: Clock = SYSTEM_CLOCK
    """The time by which it and other holders of a lease are waited for."""
    on_wait: OnWait = ignore_wait
    """Called with the reason why the hub is asked again."""
    longest_wait: float = LONGEST_WAIT
    """Seconds for which a hub that gives nothing is waited for."""
    takes_leases: bool = True
    """False where only small files are fetched, which may be fetched twice: no other process that
    fetches the repository is waited for."""

    def commit(self, repository: Repository) -> str:
        """The commit that the repository's revision means in this run; empty where no hub may be
        asked and nothing is known of it. A collective.

        Raises:
            BadInput: there is no such repository or revision, or no right to it.
            HubUnavailable: the hub can't be asked.
        """
        commit = self.recorded_commits.get(repository.path, "")
        if not commit:
            commit = ranks.run_on_rank0(lambda: _resolve_commit(repository, self))
        if commit:
            self.commits[repository.path] = commit
        return commit

    def snapshot(self, repository: Repository, choose: Callable[[Fetch], Path]) -> tuple[Path, str]:
        """Folder and commit; `choose` fetches what is needed, in one process per node. A
        collective.

        Raises:
            BadInput: as commit; or a file is not there, and no hub may be asked.
            HubUnavailable: the hub gave nothing for too long.
            DiskFailed: there is no room.
        """
        commit = self.commit(repository)

        def fetch_names(names: list[str]) -> Path:
            return fetch_snapshot(repository, commit, names, self)

        folder = ranks.run_on_node_leader(lambda: choose(fetch_names))
        return folder, commit


def _resolve_commit(repository: Repository, hub: Hub) -> str:
    with _translated_refusals(repository):
        # No file system takes a lease whose name is too long.
        validate_repo_id(repository.name)
    if repository.revision and COMMIT.fullmatch(repository.revision):
        return repository.revision
    commit_file = repository.storage / "refs" / (repository.revision or "main")
    if is_offline_mode():
        return commit_file.read_text(encoding="utf-8") if commit_file.is_file() else ""

    @answers_of_the_hub()
    def ask() -> str:
        api = HfApi(token=repository.token)
        try:
            info = api.repo_info(
                repository.name, repo_type=repository.kind, revision=repository.revision
            )
        except RevisionNotFoundError as error:
            raise BadInput(_unknown_revision(repository, api)) from error
        # for who may ask no hub later; huggingface_hub itself does so only where it is asked for a
        # branch
        commit_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(commit_file, info.sha or "")
        return info.sha or ""

    return run_under_lease(repository, ask, hub)


def fetch_snapshot(repository: Repository, commit: str, names: list[str], hub: Hub) -> Path:
    """The snapshot's folder with all files that match the names, of this process's own doing."""
    here = None if is_offline_mode() else complete_snapshot(repository, commit, names)
    if here:
        return here

    @answers_of_the_hub()
    def download() -> Path:
        already_there = complete_snapshot(repository, commit, names)
        if already_there:
            return already_there
        _drop_damaged(repository, commit, names)
        folder = snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=commit or repository.revision,
            allow_patterns=names,
            token=repository.token,
        )
        return Path(folder)

    total = _total_bytes(repository, commit, names)
    return run_under_lease(repository, download, hub, total=total)


def _total_bytes(repository: Repository, commit: str, names: list[str]) -> int:
    """Bytes in the repository's folder once these files are there; 0 where their sizes are not
    known yet."""
    files = _files(repository, commit, names)
    if files is None:
        return 0
    missing = sum(size for path, size in files.items() if not path.is_file())
    return bytes_in(repository.storage) + missing


def complete_snapshot(repository: Repository, commit: str, names: list[str]) -> Path | None:
    """The snapshot's folder, if every file that matches the names is there in its full size; no hub
    is asked."""
    files = _files(repository, commit, names)
    if files is None:
        return None
    for path, size in files.items():
        if not path.is_file() or path.stat().st_size != size:
            return None
    return repository.storage / "snapshots" / commit


def listed_files(repository: Repository, commit: str) -> set[str] | None:
    """Names of all files of a commit, as the hub listed them; None if it never has."""
    files = _files(repository, commit, ["*"])
    folder = repository.storage / "snapshots" / commit
    return None if files is None else {str(path.relative_to(folder)) for path in files}


def _files(repository: Repository, commit: str, names: list[str]) -> dict[Path, int] | None:
    """The files that match the names, with their sizes, as the hub once listed them; None if it
    never has."""
    try:
        tree = get_cached_repo_tree(repository.name, repo_type=repository.kind, revision=commit)
    except CachedRepoTreeNotFoundError:
        return None
    folder = repository.storage / "snapshots" / commit
    # No other folder's file is one of these, to be looked at or removed.
    sizes = {file.path: file.size for file in tree if not {"/", ".."} & {*Path(file.path).parts}}
    return {folder / name: sizes[name] for name in filter_repo_objects(sizes, allow_patterns=names)}


def _drop_damaged(repository: Repository, commit: str, names: list[str]) -> None:
    """Remove files of a wrong size, as a crash of the volume's server leaves them: huggingface_hub
    would keep them."""
    for path, size in (_files(repository, commit, names) or {}).items():
        if path.is_file() and path.stat().st_size != size:
            path.resolve().unlink()
            path.unlink(missing_ok=True)


def run_under_lease(
    repository: Repository, action: Callable[[], T], hub: Hub, *more: Path, total: int = 0
) -> T:
    """What `action` gets of the hub, with patience, by the holder of the repository's lease.
    `more`: folders, beside the repository's own, in which its bytes arrive. `total`: how many there
    will be, where that is known.

    Raises:
        BadInput: the hub refuses it, or the cache can't be written.
        HubUnavailable: the hub gave nothing for too long.
        DiskFailed: there is no room.
    """
    if is_offline_mode():
        with _translated_refusals(repository):
            return action()
    # Needed here only: a run with a local model has no use for the hub's client.
    from .hub_client import ANSWER_SECONDS, require_sendable, use_client

    require_sendable(repository.token or get_token(), f"spec.{repository.kind}.tokenSecretRef")
    hub.report_total(total)
    storage, what = repository.storage, repository.description
    arrivals = Arrivals([storage, *more], hub.report, hub.clock, hub.on_wait, hub.longest_wait)
    if not hub.takes_leases:
        seconds = min(ANSWER_SECONDS, hub.longest_wait)
        with _translated_refusals(repository), use_client(answer_seconds=seconds):
            return retry_passing_errors(action, what, arrivals)
    lease = Lease(storage.parent / f".{storage.name}.lease", hub.clock)
    with (
        _translated_refusals(repository),
        use_client(),
        watch_arrivals(arrivals, lease.beat),
    ):
        died = retry_passing_errors(lambda: lease.take(arrivals.report_again), what, arrivals)
        try:
            if died:
                _sweep(storage)
            return retry_passing_errors(action, what, arrivals)
        finally:
            lease.release()


def _sweep(storage: Path) -> None:
    """Remove what a killed downloader left: files that it began, and locks that not every file
    system lets go of."""
    locks = storage.parent.glob(f".locks/{storage.name}/*.lock")
    for file in (*storage.glob("blobs/*.incomplete"), *locks):
        file.unlink(missing_ok=True)


@contextmanager
def _translated_refusals(repository: Repository) -> Iterator[None]:
    """What the hub, or the cache, refuses for good is bad input."""
    try:
        yield
    except (OSError, HFValidationError) as error:
        if is_unwritable(error):
            raise BadInput(
                f"{repository.description} can't be kept: {error}. The cache must be writable for "
                "the pods' user (docs/how-to/train/data.md)"
            ) from error
        raise BadInput(
            f"{repository.description} can't be fetched: {_reason(repository, error)}"
        ) from error


def _reason(repository: Repository, error: Exception) -> str:
    """The hub's refusal in a sentence, with what to write."""
    answers = (cause for cause in error_chain(error) if isinstance(cause, HfHubHTTPError))
    error = next(answers, error)
    secret = f"spec.{repository.kind}.tokenSecretRef"
    if isinstance(error, GatedRepoError):
        return (
            f"it is gated, and the token has no right to it: accept its terms on the hub with the "
            f"account of the token in {secret}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"it has no such revision; correct spec.{repository.path}.revision"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "the hub has no such repository, or it is private and the token may not read it; "
            f"correct the name, or set {secret} to a token that may read it"
        )
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return (
            f"the hub refuses the token (HTTP {error.response.status_code}); put a valid one that "
            f"may read it into the Secret of {secret}"
        )
    return (
        f"{answer_message(error)}. Check the name, the revision, {secret} for a gated one, "
        "HF_HUB_OFFLINE and HF_ENDPOINT"
    )


MAX_REVISIONS = 8
"""Branches and tags that are named where another one was asked for."""


def _unknown_revision(repository: Repository, api: HfApi) -> str:
    """Names the revisions that a repository has."""
    names: list[str] = []
    with suppress(HfHubHTTPError, TryLater, KeyError):
        refs = api.list_repo_refs(repository.name, repo_type=repository.kind)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
    revisions_hint = f"; it has {', '.join(names[:MAX_REVISIONS])}" if names else ""
    return (
        f"spec.{repository.path}.revision: {repository.name} has no revision "
        f"{repository.revision!r}{revisions_hint}. Write a branch, a tag or a whole commit hash"
    )
