"""The folder for what is built or downloaded once, keyed by content and safe to interrupt at any
point.

Everything expensive of the harness (programs, the base image, slimmed site-packages) goes through
`cached`, so that no other module has its own idea of locking, of half-written results or of where
the cache lies.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .processes import ClusterError

REPOSITORY = Path(__file__).parents[2]
GENERATED = ("__pycache__", ".egg-info")  # folders that appear beside sources and are no content
KEY_DIGITS = 12
KEYED = re.compile(rf"(?P<name>.+)-[0-9a-f]{{{KEY_DIGITS}}}(?P<suffix>(\..+)?)")
KEPT = 3
"""Results of one name that stay, the new one included: another process may use an older one."""
NO_BUILDS = "GRPO_NO_BUILDS"
"""Set to 1 in the environment of tests: what is missing is an error there, since a build would
outlast its test."""


def cache_root() -> Path:
    """Return `grpo-operator/` under the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "grpo-operator"


def content_key(*parts: str | Path) -> str:
    """Return hex digits that change when a text, a file's bytes, or a folder's names or bytes
    change."""
    digest = hashlib.sha256()
    for part in parts:
        for name, blob in _pieces(part):
            digest.update(f"{name}\0{len(blob)}\0".encode())
            digest.update(blob)
    return digest.hexdigest()[:KEY_DIGITS]


def _pieces(part: str | Path) -> Iterator[tuple[str, bytes]]:
    if isinstance(part, str):
        yield "text", part.encode()
    elif part.is_dir():
        for file in sorted(part.rglob("*")):
            if file.is_file() and not any(part.endswith(GENERATED) for part in file.parts):
                yield str(file.relative_to(part)), file.read_bytes()
    else:
        yield part.name, part.read_bytes()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file; the kernel drops it when this process dies, however it
    dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached(target: Path, make: Callable[[Path], None], *, kept: int = KEPT) -> Path:
    """Return the target file or folder; when it is absent, let `make` write it under a temporary
    name, then rename.

    A second caller waits for the first one's result. What an interrupted caller left is deleted by
    the next. Of the results of this name, the `kept` newest stay, this one included.

    Raises:
        ClusterError: it is absent, and NO_BUILDS forbids to make it.
    """
    if target.exists():
        return target
    require_builds_allowed(_name(target))
    with locked(target.parent / f".{target.name}.lock"):
        if not target.exists():
            part = target.parent / f".{target.name}.part"
            remove(part)
            # Before the new one is made: a disk that holds two images of 9 GB may not hold three.
            _drop_old(target, kept - 1)
            try:
                make(part)
            except BaseException:
                # A full disk stays full where the half of an image of 9 GB stays on it.
                remove(part)
                raise
            part.rename(target)
            os.utime(target)  # a make may set an older time, and the newest are kept
    return target


def require_builds_allowed(name: str) -> None:
    """Raise ClusterError if NO_BUILDS forbids to build or download what is called `name`."""
    if os.environ.get(NO_BUILDS) == "1":
        raise ClusterError(f"{name} is not built: run `make tools`")


def _name(target: Path) -> str:
    """Return the name of a result without its key."""
    match = KEYED.fullmatch(target.name)
    return match["name"] if match else target.name


def _drop_old(target: Path, kept: int) -> None:
    """Delete all but the `kept` newest results of the same name and another key, so that edits do
    not fill the disk."""
    match = KEYED.fullmatch(target.name)
    if match:
        siblings = target.parent.glob(f"{match['name']}-{'[0-9a-f]' * KEY_DIGITS}{match['suffix']}")
        newest_first = sorted(siblings, key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in newest_first[kept:]:
            remove(entry)


def remove(path: Path) -> None:
    """Delete a file or a folder tree, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
