"""What was built is tried as its users would: krew installs the plugin, a cluster runs images,
chart and manifest.

The cluster is real (harness): one node, whose containerd imports the archives.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.cluster import Cluster
from harness.programs.build import component, toolchain
from harness.programs.cache import REPOSITORY
from harness.programs.processes import ClusterError, run
from harness.settings import ClusterSettings
from harness.stack import RELEASE, SYSTEM_NAMESPACE, create_namespace

from .chart import Packaged
from .plugin import NAME, PLATFORMS, Platform
from .source import Release

EXAMPLE = REPOSITORY / "examples" / "01-first-job.yaml"
VERSION_POD = "release-version"
FOLDER_OF_TOOLS = "/usr/bin:/bin"
Say = Callable[[str], None]


def check_plugin(
    release: Release, manifest: Path, archives: dict[Platform, Path], say: Say
) -> None:
    """krew takes the manifest and installs each platform's archive; this machine's plans a job.

    Raises:
        ClusterError: krew refuses something, or the installed plugin is of another version or has
            no plan.
    """
    validate_manifest(manifest)
    with tempfile.TemporaryDirectory() as temporary:
        for platform, packed in archives.items():
            program = install(manifest, packed, platform, Path(temporary) / platform.name)
            if platform == PLATFORMS[0]:
                say(f"kubectl grpo {try_plugin(program.parent, release.version)}")
    say(f"krew installs {', '.join(platform.name for platform in archives)}")


def validate_manifest(manifest: Path) -> None:
    """Hold the manifest to what krew's index accepts; raise ClusterError with krew's words if it
    does not."""
    tools = toolchain(("krew",))
    run(tools.program("validate-krew-manifest"), "-skip-install", "-manifest", manifest)


def install(manifest: Path, packed: Path, platform: Platform, root: Path) -> Path:
    """The plugin's program, installed by krew below the root from the local archive."""
    system = {"KREW_OS": platform.os, "KREW_ARCH": platform.arch}
    krew(root, "install", "--manifest", manifest, "--archive", packed, **system)
    return root / "bin" / NAME


def krew(root: Path, *arguments: object, **variables: str) -> str:
    """What krew prints, which installs below the root; it asks nobody for a newer krew."""
    settings = {"KREW_ROOT": str(root), "KREW_NO_UPGRADE_CHECK": "1"} | variables
    given = [f"{name}={value}" for name, value in settings.items()]
    return run("env", *given, toolchain(("krew",)).program("krew"), *arguments)


def unpack(packed: Path, folder: Path) -> None:
    """Unpack a .tar.gz as tar does for users."""
    run("tar", "-xzf", packed, "-C", folder)


def try_plugin(folder: Path, version: str) -> str:
    """What `kubectl grpo --version` prints, with nothing but the folder, Python and the system's
    programs on the PATH.

    Raises:
        ClusterError: it is another version, or the first example gets no plan.
    """
    shown = kubectl_grpo(folder, "--version").strip()
    if shown != version:
        raise ClusterError(f"kubectl grpo says that it is version {shown}, not {version}")
    planned = json.loads(kubectl_grpo(folder, "plan", "-f", str(EXAMPLE), "-o", "json"))
    if not planned:
        raise ClusterError(f"kubectl grpo plan -f {EXAMPLE.name} printed no plan")
    return shown


def kubectl_grpo(folder: Path, *arguments: str) -> str:
    """What kubectl prints when it finds the plugin in the folder; the Python is the one that runs
    this."""
    path = os.pathsep.join(
        [str(folder), str(Path(sys.executable).resolve().parent), FOLDER_OF_TOOLS]
    )
    return run("env", "-i", f"PATH={path}", *component("kubectl"), "grpo", *arguments)


def check_images(release: Release, images: dict[str, Path], packaged: Packaged, say: Say) -> None:
    """A cluster runs the archives: the chart's package installs the operator, the API server takes
    the manifest.

    Raises:
        ClusterError: an image is of another version, or something is not accepted or does not
            become ready.
    """
    with Cluster.create(f"release-{os.getpid()}", ClusterSettings(nodes=1)) as cluster:
        for name, archive in images.items():
            cluster.load(archive)
            shown = version_inside(cluster, f"{release.registry}/{name}:{release.version}")
            if shown != release.version:
                raise ClusterError(f"{archive.name} has version {shown}, not {release.version}")
            say(f"containerd runs {archive.name}: {shown}")
        create_namespace(cluster, SYSTEM_NAMESPACE)
        dry_run(cluster, packaged.manifest)
        say(f"the API server takes {packaged.manifest.name}")
        if "grpo-operator" in images:
            waiting = ("--wait", "--timeout", "180s")
            cluster.helm(
                "install", RELEASE, str(packaged.chart), "--namespace", SYSTEM_NAMESPACE, *waiting
            )
            say(f"helm installs {packaged.chart.name}: the operator is ready")


def dry_run(cluster: Any, manifest: Path) -> str:
    """The API server's answer to a dry run of the manifest. Overrides field conflicts with earlier
    installers."""
    how = ("--server-side", "--force-conflicts", "--dry-run=server")
    shown: str = cluster.kubectl("apply", *how, "-f", str(manifest))
    return shown


def version_inside(cluster: Cluster, image: str) -> str:
    """What `grpo --version` prints in a pod of the image."""
    spec = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "main",
                "image": image,
                "imagePullPolicy": "Never",
                "command": ["grpo", "--version"],
            },
        ],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": VERSION_POD}, "spec": spec}
    cluster.kubectl("create", "-f", "-", input=json.dumps(pod))
    phase = ("get", "pod", VERSION_POD, "-o", "jsonpath={.status.phase}")
    cluster.wait(image, *phase, expect="Succeeded", seconds=180)
    shown = cluster.kubectl("logs", VERSION_POD).strip()
    cluster.kubectl("delete", "pod", VERSION_POD)
    return shown
