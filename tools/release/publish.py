"""`python -m tools.release.publish`, for `make publish`: put a folder of `make release` where users
install it from, and sign it.

Images go first and the chart after them, so that nothing is named before it is there. The same code
publishes to a registry and an index on loopback in tests.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from harness.programs.build import toolchain
from harness.programs.processes import ClusterError, run
from harness.programs.python_packages import uv
from harness.programs.registries import skopeo

from .archives import sha256
from .source import LOCAL

FACTS_FILE = "release.json"
CHECKSUMS = "SHA256SUMS"
SIGNATURE = f"{CHECKSUMS}.sig"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What release.json says: `images` are digests by image name."""

    version: str
    commit: str
    registry: str
    images: dict[str, str]


@dataclass(frozen=True)
class Destination:
    """Where a release goes, beside its registry.

    index: URL that takes Python packages. key: cosign's private key; its password is in the
    environment variable COSIGN_PASSWORD.
    rehearsal: registry and index are on this machine, by plain HTTP, and no signature is entered in
    the public transparency log.
    """

    index: str
    key: Path
    _: KW_ONLY
    rehearsal: bool = False


def main() -> int:
    """Publish; errors go to stderr in one sentence and the exit code is 1."""
    options = _parser().parse_args()
    to = Destination(options.index, options.key, rehearsal=options.rehearsal)
    try:
        publish(options.release, to, lambda text: print(text, flush=True))
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def publish(folder: Path, to: Destination, say: Say) -> None:
    """Push and sign the folder's images, push its chart and its Python packages, and sign its
    checksums.

    Raises:
        ClusterError: a file differs from its checksum, the release names no registry, or a step is
            refused.
    """
    facts = read_facts(folder)
    check_files(folder)
    for name, digest in facts.images.items():
        push_image(folder, facts, name, to)
        say(f"{facts.registry}/{name}:{facts.version}@{digest} is pushed, signed and attested")
    (chart,) = folder.glob(f"grpo-operator-{facts.version}.tgz")
    plain_http = ("--plain-http",) if to.rehearsal else ()
    helm = toolchain(("helm",)).program("helm")
    run(helm, "push", chart, f"oci://{facts.registry}/charts", *plain_http)
    say(f"oci://{facts.registry}/charts/grpo-operator:{facts.version} is pushed")
    packages = sorted(folder.glob(f"grpo_operator-{facts.version}*"))
    run(uv(), "publish", "--publish-url", to.index, *_index_login(to), *packages)
    say(f"{to.index} has {', '.join(package.name for package in packages)}")
    signature = folder / SIGNATURE
    _cosign("sign-blob", to, "--output-signature", signature, folder / CHECKSUMS)
    say(f"{signature.name} is written: put {_downloads(folder)} on the downloads' server")


def read_facts(folder: Path) -> Facts:
    """Read release.json.

    Raises:
        ClusterError: it is absent, or names no registry that images can be pushed to.
    """
    file = folder / FACTS_FILE
    if not file.exists():
        raise ClusterError(f"{file} is absent: run `make release TO={folder}` first")
    facts = Facts(**json.loads(file.read_text()))
    if facts.registry == LOCAL:
        raise ClusterError(f"{file} names no registry: run `make release REGISTRY=…` again")
    return facts


def check_files(folder: Path) -> None:
    """Hold the folder's files to SHA256SUMS.

    Raises:
        ClusterError: with the files that are absent or differ.
    """
    differing = []
    for line in (folder / CHECKSUMS).read_text().splitlines():
        checksum, name = line.split("  ", 1)
        file = folder / name
        if not file.exists() or sha256(file) != checksum:
            differing.append(name)
    if differing:
        raise ClusterError(
            f"{folder}: {', '.join(differing)} differ from {CHECKSUMS}: run `make release "
            f"TO={folder}` again"
        )


def push_image(folder: Path, facts: Facts, name: str, to: Destination) -> None:
    """Push an image's archive, and sign its digest and its SBOM.

    Raises:
        ClusterError: the registry has another digest than release.json, or a step is refused.
    """
    (archive,) = folder.glob(f"{name}-image-{facts.version}-*.tar")
    image = f"{facts.registry}/{name}"
    tls = ("--dest-tls-verify=false",) if to.rehearsal else ()
    source, target = f"oci-archive:{archive}", f"docker://{image}:{facts.version}"
    # The signature is for the digest in release.json, so the registry must take the image as it is.
    run(skopeo(), "--insecure-policy", "copy", "--preserve-digests", *tls, source, target)
    signed = f"{image}@{facts.images[name]}"
    _cosign("sign", to, signed)
    sbom = archive.with_suffix(".cdx.json")
    _cosign("attest", to, "--type", "cyclonedx", "--predicate", sbom, signed)


def _cosign(verb: str, to: Destination, *arguments: object) -> None:
    options = ["--key", to.key, "--yes"]
    if to.rehearsal:
        options.append("--tlog-upload=false")
        if verb != "sign-blob":
            options.append("--allow-http-registry")
    run(toolchain(("cosign",)).program("cosign"), verb, *options, *arguments)


def _index_login(to: Destination) -> tuple[str, ...]:
    """The rehearsal's index takes anybody; for a real one uv reads UV_PUBLISH_TOKEN."""
    if not to.rehearsal:
        return ()
    return ("--username", "anybody", "--password", "none")


def _downloads(folder: Path) -> str:
    files = sorted(path.name for path in folder.iterdir() if "-image-" not in path.name)
    return ", ".join(files)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.release.publish", description=__doc__)
    parser.add_argument("release", type=Path, help="folder that `make release` filled")
    parser.add_argument("--index", required=True, help="URL that takes Python packages")
    parser.add_argument("--key", type=Path, required=True, help="cosign's private key")
    parser.add_argument(
        "--rehearsal", action="store_true", help="plain HTTP, and no public transparency log"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
