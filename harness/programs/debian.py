"""Debian's packages without installing them: what tests need of one lies in the cache, the machine
stays as it is."""

import subprocess
import tempfile
from functools import partial
from pathlib import Path

from .cache import cache_root, cached
from .prerequisites import apt_alone
from .processes import ClusterError


def program(package: str, name: str) -> Path:
    """Return the path of a program of a package, which is fetched on first use.

    Raises:
        ClusterError: as `unpack`.
    """
    folder = cached(cache_root() / f"{package}-debian", partial(unpack, package))
    return folder / "usr" / "bin" / name


def unpack(package: str, folder: Path) -> None:
    """Download the newest version that the machine's package lists have, and unpack its files into
    the folder.

    Raises:
        ClusterError: it can't be downloaded; this works on Debian and its derivatives.
    """
    with apt_alone(), tempfile.TemporaryDirectory() as temporary:
        download = ["apt-get", "download", package]
        done = subprocess.run(download, cwd=temporary, capture_output=True, text=True, check=False)
        if done.returncode:  # the package lists may be absent or too old
            subprocess.run(["apt-get", "update"], capture_output=True, check=False)
            done = subprocess.run(
                download, cwd=temporary, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise ClusterError(f"`{' '.join(download)}` failed: {done.stderr}")
        (archive,) = Path(temporary).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", str(archive), str(folder)], check=True)
