"""What the harness needs from the machine: say everything that is missing at once, install it when
that is possible.

`up` and the image builder ask before they start anything: half a cluster is worse than none.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .cache import cache_root, locked, require_builds_allowed
from .processes import ClusterError

APT = Path("/usr/bin/apt-get")
MEMORY = Path("/proc/meminfo")
NAMESPACES = ("--pid", "--mount", "--net", "--uts", "--ipc")
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
# program (or file) → the Debian package that has it
API_TOOLS = {"openssl": "openssl"}
NODE_TOOLS = {
    "gcc": "gcc",
    "pkg-config": "pkg-config",
    "/usr/include/seccomp.h": "libseccomp-dev",
    "ip": "iproute2",
    "iptables": "iptables",  # the portmap plugin and the kubelet use it in the nodes
    "nft": "nftables",
    "unshare": "util-linux",
    "mount": "mount",
    "ptp": "containernetworking-plugins",
}
PICTURE_TOOLS = {
    "chromium-headless-shell": "chromium-headless-shell",
    "/usr/share/fonts/opentype/inter": "fonts-inter",  # Grafana's font, which its server brings
}
IMAGE_TOOLS = {
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "gcc": "gcc",
    "readelf": "binutils",
}


def cni_folder() -> Path:
    """Return the folder of the pod network's plugins."""
    for folder in CNI_FOLDERS:
        if (folder / "ptp").exists():
            return folder
    raise ClusterError("no pod network plugins: apt-get install -y containernetworking-plugins")


def require(nodes: bool, images: bool = False) -> None:
    """Make sure that the API level's tools are there, and those of the node level or of image
    building if asked.

    Raises ClusterError with all that is missing and the command that installs it. On Debian, as
    root, it runs that command instead.
    """
    if nodes and (refused := refused_namespaces_message()):
        raise ClusterError(refused)
    require_tools({**API_TOOLS, **(NODE_TOOLS if nodes else {}), **(IMAGE_TOOLS if images else {})})


def refused_namespaces_message() -> str:
    """Return why no real node can run on this machine; empty where one can."""
    if os.geteuid() != 0:
        return "real nodes need root (namespaces, cgroups, a bridge): use sudo, or --api-only"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False
    )
    if not tried.returncode:
        return ""
    return (
        f"real nodes need namespaces, and this machine refuses them ({tried.stderr.strip()}): use "
        "a host or a virtual machine, or a privileged container"
    )


def require_room(gigabytes_of_disk: float, gigabytes_of_memory: float) -> None:
    """Make sure that the disk has so much for the cache, with what the cache takes already, and
    that memory is there.

    Raises:
        ClusterError: it is not; the message says how much is.
    """
    folder = cache_root()
    folder.mkdir(parents=True, exist_ok=True)
    disk = (shutil.disk_usage(folder).free + _bytes_in(folder)) / 1e9
    memory = available_memory() / 1e9
    if disk < gigabytes_of_disk:
        raise ClusterError(
            f"{gigabytes_of_disk:.0f} GB of disk are needed and {disk:.1f} are there for "
            f"{folder}: make room, or set "
            "XDG_CACHE_HOME to a folder on a larger disk"
        )
    if memory < gigabytes_of_memory:
        raise ClusterError(
            f"{gigabytes_of_memory:.0f} GB of memory are needed and {memory:.1f} are available"
        )


def _bytes_in(folder: Path) -> int:
    """Return how much of the disk the folder's files take; a file that goes meanwhile takes
    nothing."""
    taken = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                taken += 512 * os.lstat(f"{parent}/{name}").st_blocks
    return taken


def available_memory() -> int:
    """Return how many bytes of memory new processes can take."""
    (line,) = (line for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def require_tools(tools: dict[str, str]) -> None:
    """Make sure that these programs and files are there, installing them or raising as `require`
    does."""
    packages = _missing(tools)
    if packages:
        require_builds_allowed(", ".join(packages))
    if packages and APT.exists() and os.geteuid() == 0:
        with apt_alone():
            packages = _missing(tools)
            if packages:
                _install(packages)
        packages = []
    if packages:
        raise ClusterError(
            f"missing on this machine; install it with:\n  apt-get install -y {' '.join(packages)}"
        )


@contextmanager
def apt_alone() -> Iterator[None]:
    """apt does not wait for another apt: test workers take turns."""
    with locked(cache_root() / "apt.lock"):
        yield


def _missing(tools: dict[str, str]) -> list[str]:
    return sorted({package for tool, package in tools.items() if not _present(tool)})


def _present(tool: str) -> bool:
    if tool.startswith("/"):
        return Path(tool).exists()
    if tool == "ptp":
        return any((folder / tool).exists() for folder in CNI_FOLDERS)
    return (
        shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin") is not None
    )


def _install(packages: list[str]) -> None:
    """Install the packages; the package lists may be absent or too old, so a first failure updates
    them."""
    sys.stderr.write(f"installing {' '.join(packages)}\n")
    command = [str(APT), "install", "-y", "--no-install-recommends", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
        subprocess.run([str(APT), "update"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
