"""An object store as the trainer needs it: whole objects, conditional writes, and patience with
what passes.

Every request is asked again after what may pass, and the client below asks again by itself. So a
write may have been carried out although its answer is a refusal: one's own write was met. Who
writes under a condition settles that by reading (run_store.py).
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    JoinError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import ObjectStore, from_url

from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.text.clock import Clock
from grpo_api.text.messages import connection_problem

from ..runtime.clock import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    POLL_SECONDS,
    SYSTEM_CLOCK,
    OnWait,
    ignore_wait,
)
from ..runtime.errors import BadInput, Denied, StoreFailed
from .store_base import PART_BYTES, REGION

log = logging.getLogger(__name__)

REQUEST_SECONDS = 120
"""Longest time of one request, so that a part of PART_BYTES gets through at 140 KB/s."""
LONG_TRIES = 3
"""Uploads of one file that may fail although requests of them were answered: each begins again."""
DELETED_AT_ONCE = 1000
"""Most objects that S3 deletes by one request."""

Version = dict[str, str]
"""What a conditional write says of the object that it replaces: `e_tag`, `version`, or both."""
T = TypeVar("T")

_FOR_GOOD = re.compile(
    r"status code: 4(?!08|09|25|29)[0-9]{2}\b|Received redirect without LOCATION"
)
"""A client error that the same request would get again (RFC 9110, section 15.5), and what S3 says
where a bucket is in another region."""
_STATUS = re.compile(r"status code: ([1-5][0-9]{2} [A-Za-z ]+)")
_REASONS = (re.compile(r"<Code>([^<]*)</Code>"), re.compile(r"<Message>([^<]*)</Message>"))
"""Of a store's own words: beside them an answer may repeat the request, with the keys in it."""
MAX_ANSWER = 160
"""Characters of what a store or its client says of an error."""
_REGIONS = frozenset({"region", "aws_region"})
_ACCOUNTS = frozenset({"account_name", "azure_storage_account_name"})


class Store:
    """A folder of an object store; keys are relative to it. May be used by several threads."""

    def __init__(
        self,
        url: str,
        backend: ObjectStore,
        on_answer: OnWait = ignore_wait,
        longest_wait: float = LONGEST_WAIT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`on_answer` is called at each sign of work: with an empty text when the store has
        answered, and during pauses with the reason why it is asked again."""
        self.url = url
        self.longest_wait = longest_wait
        """Seconds without any answer of the store until a request is given up."""
        self._backend = backend
        self._on_answer = on_answer
        self._clock = clock
        self._lock = threading.Lock()
        self._answered_at = 0.0

    def within(self, longest_wait: float) -> "Store":
        """The same store with another limit for its waits, in seconds."""
        return Store(self.url, self._backend, self._on_answer, longest_wait, self._clock)

    def get(self, key: str) -> tuple[bytes, Version] | None:
        """An object and its version; None if it does not exist.

        Raises:
            StoreFailed: the store gave nothing for too long. So do all methods below.
            Denied: the store refuses. So do all methods below.
        """

        def get() -> tuple[bytes, Version] | None:
            try:
                response = obstore.get(self._backend, key)
                content, version = bytes(response.bytes()), _version(response.meta)
            except FileNotFoundError:
                return None
            # A page in its place does not mean that what counts is damaged.
            if not version:
                raise ConnectionError("an answer without ETag, so not the store's: a proxy's?")
            return content, version

        return self._ask(f"get {key}", get)

    def stream(self, key: str, offset: int = 0) -> Iterator[bytes]:
        """The bytes of an object from there on, PART_BYTES at a time: what breaks off is asked for
        again alone."""
        size = self._ask(f"head {key}", lambda: obstore.head(self._backend, key)["size"])
        for begin in range(offset, size, PART_BYTES):
            end = min(begin + PART_BYTES, size)
            yield self._ask(f"get {key}", partial(self._range, key, begin, end))

    def bring(self, key: str, folder: Path) -> None:
        """Write the objects below a key as files of a folder.

        Raises:
            OSError: the disk fails, or is full.
        """
        for name in self.object_sizes(key):
            path = folder / name.removeprefix(f"{key}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(self.stream(name))

    def _range(self, key: str, begin: int, end: int) -> bytes:
        return bytes(obstore.get_range(self._backend, key, start=begin, end=end))

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever is there."""
        self._ask(f"put {key}", lambda: obstore.put(self._backend, key, data, use_multipart=False))

    def put_file(self, key: str, path: Path) -> None:
        """Write a file as one object, a large one in several requests."""

        def upload_file() -> None:
            obstore.put(self._backend, key, path, chunk_size=PART_BYTES, max_concurrency=4)

        self._ask(f"put {key}", upload_file)

    def put_if_unchanged(self, key: str, data: bytes, version: Version | None) -> bool:
        """Write an object if it still has `version`, or does not exist if that is None; return
        whether it was written.

        False may also mean that an earlier try of this write succeeded and its answer was lost.
        """

        def put_matching() -> bool:
            try:
                obstore.put(self._backend, key, data, mode=version or "create", use_multipart=False)  # type: ignore[arg-type]
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return self._ask(f"put {key} if it is unchanged", put_matching)

    def object_sizes(self, folder: str = "", *, may_be_empty: bool = False) -> dict[str, int]:
        """Keys of all objects of a folder, with their sizes in bytes."""

        def list_sizes() -> dict[str, int]:
            pages = obstore.list(self._backend, folder or None, chunk_size=1000)
            sizes = {entry["path"]: entry["size"] for page in pages for entry in page}
            # The client takes any XML for a list, such as a page, in which nothing is named.
            if not sizes and not may_be_empty:
                raise ConnectionError("a list without the objects that are there: a proxy's page?")
            return sizes

        return self._ask(f"list {folder}".strip(), list_sizes)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is gone already is no matter."""
        for begin in range(0, len(keys), DELETED_AT_ONCE):
            some = keys[begin : begin + DELETED_AT_ONCE]
            self._ask(f"delete {some[0]} and {len(some) - 1} more", partial(self._delete, some))

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            obstore.delete(self._backend, keys)
        # Where a store says so of one, what is left must be asked for one by one.
        except FileNotFoundError:
            for key in keys:
                with suppress(FileNotFoundError):
                    obstore.delete(self._backend, key)

    def _ask(self, what: str, action: Callable[[], T]) -> T:
        pause, asked_at, long_tries = FIRST_PAUSE, self._clock.now(), 0
        while True:
            tried_at = self._clock.now()
            try:
                result = action()
            except BaseException as error:
                self._require_passing(what, error)
                # A file is many requests, most of which were answered if they took so long.
                is_long = self._clock.now() - tried_at > 2 * REQUEST_SECONDS
                if is_long and long_tries < LONG_TRIES:
                    long_tries += 1
                    asked_at = self._clock.now() - REQUEST_SECONDS
                with self._lock:
                    silence = self._clock.now() - max(asked_at, self._answered_at)
                problem = self._problem(error)
                reason = problem.removeprefix(f"{self.url}: ")
                if silence + pause > self.longest_wait:
                    self._on_answer("")
                    raise StoreFailed(
                        f"{self.url}: {what}: no answer for {silence:.0f} s, the last try failed "
                        f"with: {reason}"
                    ) from error
                log.warning(f"{self.url}: {what}: {reason}; again in {pause:.0f} s")
            else:
                with self._lock:
                    self._answered_at = self._clock.now()
                self._on_answer("")
                return result
            self._wait(pause, problem)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _problem(self, error: BaseException) -> str:
        """Why a request failed, in the same words at each try."""
        problem = StoreFailed(_error_message(error))
        problem.__cause__ = error
        return connection_problem(problem, self.url)

    def _wait(self, seconds: float, problem: str) -> None:
        end = self._clock.now() + seconds
        while (seconds_left := end - self._clock.now()) > 0:
            self._on_answer(problem)
            self._clock.sleep(min(seconds_left, POLL_SECONDS))

    def _require_passing(self, what: str, error: BaseException) -> None:
        if _is_panic(error):
            raise Denied(
                f"{self.url}: {what} can't be sent. A key of credentialsSecretRef holds a line "
                "break or another character that no request takes: store it again"
            ) from error
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | FileNotFoundError)
        if denied or (isinstance(error, GenericError) and _FOR_GOOD.search(str(error))):
            raise Denied(
                f"{self.url}: {what} is refused: {_error_message(error)}. Check the bucket, the "
                "endpoint, the region and the rights of the credentials "
                "(docs/how-to/models/object-stores.md)"
            ) from error
        # A conflict that no condition of ours explains is with another request of this moment.
        conflict = isinstance(error, AlreadyExistsError | PreconditionError)
        if not (conflict or isinstance(error, GenericError | JoinError | OSError)):
            raise error


def _is_panic(error: BaseException) -> bool:
    """Whether the client, which is Rust, has panicked. Its exception can't be imported, and is no
    Exception."""
    return type(error).__name__ == "PanicException"


def _version(meta: Mapping[str, Any]) -> Version:
    """What identifies an object's version: an ETag, a version, or both."""
    return {name: str(meta[name]) for name in ("e_tag", "version") if meta[name]}


def _error_message(error: BaseException) -> str:
    """What the store answered, or the first line of what its client says, which goes on with its
    own source files."""
    text = str(error)
    status = _STATUS.search(text)
    if status is None:
        # Before the dash is the request with its milliseconds: another text at each try.
        return text.strip().partition("\n")[0].rpartition(" - ")[2][:MAX_ANSWER]
    reasons = [found[1] for reason in _REASONS if (found := reason.search(text))]
    return " ".join(": ".join([f"HTTP {status[1].strip()}", *reasons]).split())[:MAX_ANSWER]


def open_store(
    spec: ObjectStoreSpec,
    settings: dict[str, str],
    on_answer: OnWait = ignore_wait,
    folder: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> Store:
    """A client for a folder below the spec's URL. Sends no request yet. `settings` are the
    client's own, such as AWS_ACCESS_KEY_ID, over those of the environment.

    Raises:
        BadInput: the client doesn't know a setting, or does not accept its value.
    """
    url = f"{spec.url}/{folder}" if folder else spec.url
    where, config = url, dict(settings)
    names = {name.lower() for name in settings}
    if spec.url.startswith("s3://"):
        if spec.endpoint:
            config["endpoint"] = spec.endpoint
        if spec.region or not _REGIONS & names:
            config["region"] = spec.region or REGION
    if spec.url.startswith("az://"):
        # The client's own URLs begin with the container.
        account, _, path = url.removeprefix("az://").partition("/")
        config = {name: config[name] for name in config if name.lower() not in _ACCOUNTS}
        where, config["account_name"] = f"az://{path}", account
    try:
        backend = from_url(
            where,
            config=config,  # type: ignore[call-overload]  # its type lists every key of every store
            client_options={
                "timeout": timedelta(seconds=REQUEST_SECONDS),
                # The user asked for a connection without TLS.
                "allow_http": (spec.endpoint or "").startswith("http://"),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
        )
    except BaseException as error:
        known = UnknownConfigurationKeyError | BaseError | ValueError
        if not (_is_panic(error) or isinstance(error, known)):
            raise
        problem = _error_message(error)
        if _is_panic(error):
            problem = "remove what is of connections and not of the store, such as ALLOW_HTTP"
        raise BadInput(
            f"the object store {spec.url} can't be opened with the settings "
            f"{', '.join(sorted(config))}: {problem} (docs/how-to/models/object-stores.md)"
        ) from error
    return Store(url, backend, on_answer, clock=clock)
