"""The Debian base of test images: what `python:3.11-slim-bookworm` is elsewhere, made by
mmdebstrap.

No registry is reachable on a test machine. mmdebstrap takes half of
debootstrap's time, and installs what Debian's security archive has.
"""

import subprocess
import tempfile
from pathlib import Path

from ..programs.cache import cache_root, cached, content_key, remove
from ..programs.processes import ClusterError
from ..programs.progress import progress

RELEASE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
# Without it apt installs the package usrmerge, which brings Perl.
MERGED_USR_HOOKS = "/usr/share/mmdebstrap/hooks/maybe-merged-usr"
# of no use in a container: package lists and caches, translations, manuals
UNWANTED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/locale", "usr/share/man")
DOCUMENTATION, LICENSES = "usr/share/doc", "copyright"
"""Each package keeps its license: a person who distributes an image must distribute the licenses
too."""


def base_tar() -> Path:
    """Return a tar of the base's root folder, made on first use (about a minute)."""
    key = content_key(RELEASE, *PACKAGES, MERGED_USR_HOOKS, *UNWANTED, DOCUMENTATION, LICENSES)
    return cached(cache_root() / f"base-{RELEASE}-{key}.tar", _bootstrap)


def _bootstrap(archive: Path) -> None:
    with (
        progress(f"the base image from Debian {RELEASE}"),
        tempfile.TemporaryDirectory() as temporary,
    ):
        root = Path(temporary) / "root"
        # a pid namespace of its own: what a package's script may start ends with it, and so do
        # mmdebstrap's mounts
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
        ]
        command += ["mmdebstrap", "--variant=minbase", f"--hook-dir={MERGED_USR_HOOKS}"]
        command += [f"--include={','.join(PACKAGES)}", RELEASE, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"mmdebstrap failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        for folder in UNWANTED:
            remove(root / folder)
            (root / folder).mkdir(parents=True)
        keep_licenses(root / DOCUMENTATION)
        subprocess.run(
            ["tar", "--create", "--file", archive, "--directory", root, "--numeric-owner", "."],
            check=True,
        )


def keep_licenses(folder: Path) -> None:
    """Delete all below the folder but files called LICENSES, and links, by which packages share a
    folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.name != LICENSES and not path.is_symlink():
            path.unlink()
