"""Prometheus and promtool, from Debian's package without installing it: what metrics and alerts are put to.

Only Prometheus knows whether it can read what we write.
"""

import subprocess
import tempfile
from pathlib import Path

from .cache import cache_root, cached
from .prerequisites import apt_alone
from .processes import ClusterError

PACKAGE = "prometheus"


def program(name: str) -> Path:
    """Path of `prometheus` or `promtool`, fetched on first use (20 MB).

    Raises:
        ClusterError: the package can't be downloaded; this works on Debian and its derivatives.
    """
    return cached(cache_root() / f"{PACKAGE}-debian", _unpack) / "usr" / "bin" / name


def _unpack(folder: Path) -> None:
    with apt_alone(), tempfile.TemporaryDirectory() as temporary:
        download = ["apt-get", "download", PACKAGE]
        done = subprocess.run(download, cwd=temporary, capture_output=True, text=True, check=False)
        if done.returncode:  # the package lists may be absent or too old
            subprocess.run(["apt-get", "update"], capture_output=True, check=False)
            done = subprocess.run(download, cwd=temporary, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"`{' '.join(download)}` failed: {done.stderr}")
        (package,) = Path(temporary).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
