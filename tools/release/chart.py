"""The chart's package and the static manifest, by real helm."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.programs.build import toolchain
from harness.programs.cache import REPOSITORY
from harness.programs.processes import run
from harness.stack import RELEASE, RESTRICTED, SYSTEM_NAMESPACE

from .archives import settle_package
from .source import CHART, Release

UNSET = 'imageRegistry: ""\n'
IMAGES = {"image": "grpo-operator", "trainerImage": "grpo-trainer"}
"""The chart's values for images, and the images' names."""


@dataclass(frozen=True)
class Packaged:
    """The chart's package and the manifest of all that it installs."""

    chart: Path
    manifest: Path


def build(release: Release, target: Path, digests: dict[str, str]) -> Packaged:
    """Write both into the folder: the chart looks for images in the release's registry.

    digests: of the images that were built, by their names; the manifest names these by them.
    """
    chart = package(release, target)
    manifest = target / "install.yaml"
    manifest.write_text(static_manifest(chart, digests))
    return Packaged(chart, manifest)


def package(release: Release, target: Path) -> Path:
    """Write the chart's package into the folder."""
    with tempfile.TemporaryDirectory() as temporary:
        chart = Path(shutil.copytree(REPOSITORY / CHART, Path(temporary) / CHART.name))
        values = chart / "values.yaml"
        text = values.read_text()
        assert text.count(UNSET) == 1, f"values.yaml must have one line {UNSET!r}"
        values.write_text(text.replace(UNSET, f"imageRegistry: {release.registry}\n"))
        about = chart / "Chart.yaml"
        about.write_text(
            yaml.safe_dump(
                _with_images(yaml.safe_load(about.read_text()), release), sort_keys=False
            )
        )
        _helm("package", chart, "--destination", target)
    archive = target / f"{CHART.name}-{release.version}.tgz"
    settle_package(archive, release.epoch)
    return archive


def _with_images(about: dict[str, Any], release: Release) -> dict[str, Any]:
    """A Chart.yaml that names the images, for Artifact Hub's scanners."""
    images = [
        {"name": name, "image": f"{release.registry}/{name}:{release.version}"}
        for name in IMAGES.values()
    ]
    listed = {"artifacthub.io/images": yaml.safe_dump(images, sort_keys=False)}
    return about | {"annotations": about["annotations"] | listed}


def static_manifest(chart: Path, digests: dict[str, str]) -> str:
    """Everything that a release of the chart with its defaults consists of, with its namespace, for
    `kubectl apply`."""
    pins = [f"{value}.digest={digests[name]}" for value, name in IMAGES.items() if name in digests]
    flags = [part for pin in pins for part in ("--set", pin)]
    rendered = _helm(
        "template", RELEASE, chart, "--namespace", SYSTEM_NAMESPACE, "--skip-tests", *flags
    )
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": SYSTEM_NAMESPACE, "labels": RESTRICTED},
    }
    return f"{yaml.safe_dump(namespace, sort_keys=False)}{rendered}"


def _helm(*arguments: object) -> str:
    return run(toolchain(("helm",)).program("helm"), *arguments)
