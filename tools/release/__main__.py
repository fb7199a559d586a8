"""`python -m tools.release`: for `make release`. Builds what a release publishes, checks it, and
pushes nothing."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import yaml

from harness.images.recipes import SHIPPED, build_shipped
from harness.programs.processes import ClusterError
from harness.programs.progress import progress

from . import chart, checks, oci, plugin, python_package, sbom
from .archives import empty, write_checksums
from .publish import FACTS_FILE, Facts
from .source import LOCAL, Release, current, lacking

DOWNLOADS = "https://grpo.dev/releases"
DESCRIPTIONS = {
    "grpo-operator": "Plans, runs, proves and watches distributed GRPO training jobs",
    "grpo-trainer": "Trains by GRPO in the pods of grpo-operator's jobs",
}


def main() -> int:
    """Build and check; errors go to stderr in one sentence and the exit code is 1."""
    options = _parser().parse_args()
    try:
        release = current(options.registry, options.downloads)
        build(release, options.to, options.images)
        for sentence in lacking(release):
            _say(f"before it may be published: {sentence}")
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def build(release: Release, target: Path, images: list[str]) -> None:
    """Fill the folder with the release, of the images only these, and check it.

    Raises:
        ClusterError: something could not be built, or a check failed.
    """
    empty(target)
    wheel, _ = python_package.build(target, release.epoch)
    archives = plugin.build(release, wheel, target)
    manifest = target / "grpo.yaml"
    manifest.write_text(yaml.safe_dump(plugin.manifest(release, archives), sort_keys=False))
    checks.check_plugin(release, manifest, archives, _say)
    built = {name: build_image(release, name, target) for name in images}
    digests = {name: digest for name, (_, digest) in built.items()}
    packaged = chart.build(release, target, digests)
    checks.check_images(release, {name: path for name, (path, _) in built.items()}, packaged, _say)
    write_facts(release, digests, target)
    _say(f"{target}: version {release.version}, {len(list(target.iterdir()))} files")


def write_facts(release: Release, digests: dict[str, str], target: Path) -> None:
    """Write release.json, and checksums of all that is in the folder."""
    facts = Facts(release.version, release.commit, release.registry, digests)
    (target / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=1) + "\n")
    write_checksums(target)


def build_image(release: Release, name: str, target: Path) -> tuple[Path, str]:
    """Build an image, and write its OCI archive and its SBOM into the folder; returns the archive
    and the image's digest."""
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        docker = Path(temporary) / "docker.tar"
        build_shipped(name, release.epoch, docker)
        return write_image(release, name, docker, target)


def write_image(release: Release, name: str, docker: Path, target: Path) -> tuple[Path, str]:
    """Write the OCI archive and the SBOM of a docker archive's image into the folder; returns the
    archive and the image's digest."""
    labels = {
        "org.opencontainers.image.title": name,
        "org.opencontainers.image.description": DESCRIPTIONS[name],
        "org.opencontainers.image.version": release.version,
        "org.opencontainers.image.revision": release.commit,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        part = Path(temporary) / "oci.tar"
        with progress(f"the OCI archive of {name}"):
            image = f"{release.registry}/{name}:{release.version}"
            digest = oci.write_archive(docker, part, image, labels, release.epoch)
        archive = part.rename(target / f"{name}-image-{release.version}-{oci.platform(part)}.tar")
    packages = sbom.write(release, archive, name, digest, archive.with_suffix(".cdx.json"))
    _say(f"{archive.name}: {digest}, {archive.stat().st_size / 1e6:.0f} MB, {packages} packages")
    return archive, digest


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument(
        "--to", type=Path, default=Path("release-output"), help="folder for it all; replaced"
    )
    where = (
        f"registry and project of the images, which chart and manifest name (default {LOCAL}: "
        "imported by hand)"
    )
    parser.add_argument("--registry", default=LOCAL, help=where)
    address = (
        "address of the folder that will hold the files, which krew's manifest names "
        f"(default {DOWNLOADS})"
    )
    parser.add_argument("--downloads", default=DOWNLOADS, help=address)
    parser.add_argument(
        "--images", nargs="*", default=[*SHIPPED], choices=[*SHIPPED], help="default: all"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
