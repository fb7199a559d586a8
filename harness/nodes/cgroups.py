"""Control groups of both versions: each node's pods live below a group of their own, so that
removal is complete.

A node's first process makes them, `down` removes them.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..programs.processes import ClusterError, until

CONTROLLERS = frozenset(
    {"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}
)  # what a kubelet asks for

CPU_PRECEDENCE = 8
"""Weight of a cluster's pods against another session of the machine. All pods share one group, and
each process that was started in a session of its own has the default weight. Beside six such
processes a gang got a seventh of both cores: its test took three times as long as alone."""
CPU_WEIGHTS = {"cpu.shares": 1024, "cpu.weight": 100}
"""Files of version 1 and 2, with the default of each."""


def group(directory: Path) -> str:
    """Return the name of the group of the cluster whose state lies in the folder."""
    return f"grpo-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}"


def roots() -> Iterator[Path]:
    """Yield the mount points of all hierarchies: many for version 1, one for version 2, both on
    hybrid systems."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(target)


def make(path: str) -> None:
    """Create the group `path` in every hierarchy, ready to hold pods."""
    for root in roots():
        current = root
        for part in Path(path).parts:
            parent, current = current, current / part
            _delegate(parent)
            current.mkdir(exist_ok=True)
            _copy_cpuset(parent, current)
        _give_precedence(root / Path(path).parts[0])


def _delegate(parent: Path) -> None:
    """Version 2: let the parent's children use the controllers."""
    available = parent / "cgroup.controllers"
    if not available.exists():
        return
    control = parent / "cgroup.subtree_control"
    wanted = CONTROLLERS & set(available.read_text().split()) - set(control.read_text().split())
    if not wanted:
        return
    try:
        control.write_text(" ".join(f"+{name}" for name in sorted(wanted)))
    except OSError as error:
        raise ClusterError(
            f"cannot enable {', '.join(sorted(wanted))} in {control}: {error}. A group that holds "
            "processes can't have "
            "children with controllers: run on the host, or in a container with its processes in "
            "a child group"
        ) from error


def _give_precedence(cluster: Path) -> None:
    """Let the cluster's pods go before what else computes on the machine."""
    for name, default in CPU_WEIGHTS.items():
        file = cluster / name
        if file.exists():
            file.write_text(str(CPU_PRECEDENCE * default))


def _copy_cpuset(parent: Path, current: Path) -> None:
    """Version 1: a cpuset group starts empty and takes no process until it has CPUs and memory
    nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = current / name
        if (parent / "tasks").exists() and file.exists() and not file.read_text().strip():
            file.write_text((parent / name).read_text())


def require() -> None:
    """Make sure that this process may make groups that can hold pods.

    Raises:
        ClusterError: it may not.
    """
    name = f"grpo-try-{os.getpid()}"
    try:
        make(name)
    except OSError as error:
        raise ClusterError(
            f"real nodes need cgroups, and this machine refuses them ({error}): use a host or a "
            "virtual machine, or a "
            "privileged container"
        ) from error
    finally:
        for root in roots():
            with suppress(OSError):  # it was not made
                (root / name).rmdir()


def remove(directory: Path) -> None:
    """Remove the cluster's groups once their processes are gone."""
    for root in roots():
        for folder, _, _ in os.walk(root / group(directory), topdown=False):
            until(f"the end of the processes in {folder}", partial(_removed, Path(folder)), 20)


def _removed(folder: Path) -> bool:
    folder.rmdir()  # an OSError while a killed process is still being collected
    return True
