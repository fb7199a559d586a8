"""An image as an OCI archive (image-spec v1.1: an image layout in a tar), from the docker archive
that buildah wrote.

buildah could write one itself, but with the times of the build in it: here the layers are settled,
so that the digest follows from the content. What only building machines need is left out.
"""

import json
import re
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from harness.images.recipes import BUILD_ENVIRONMENT

from .archives import Hashed, copy_entries, gzip_stream, settle, tar_stream

OCI = "application/vnd.oci.image"
LAYER, CONFIG, MANIFEST = (
    f"{OCI}.layer.v1.tar+gzip",
    f"{OCI}.config.v1+json",
    f"{OCI}.manifest.v1+json",
)
LEFT_OUT = re.compile(
    r"(etc/(hostname|resolv\.conf|machine-id|pip\.conf)|var/(log|cache)/.+|var/lib/(dpkg|systemd)/.+-old|etc/(passwd|shadow|group|gshadow)-)"
)
"""Files of the building machine, logs, caches and backups; kubelets bring their own of the first
three."""


@dataclass(frozen=True)
class Blob:
    """A file of the layout and how a manifest names it; diff_id: the digest of what it unpacks
    to."""

    path: Path
    kind: str
    digest: str
    size: int
    diff_id: str = ""

    @property
    def descriptor(self) -> dict[str, Any]:
        """As in a manifest."""
        return {"mediaType": self.kind, "digest": self.digest, "size": self.size}


def write_archive(docker: Path, target: Path, name: str, labels: dict[str, str], epoch: int) -> str:
    """Write the docker archive's only image as `name`, with these labels; returns the digest of its
    manifest.

    The index names it for containerd and, by its tag, as the specification says.
    """
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as temporary,
        tarfile.open(docker) as archive,
    ):
        folder = Path(temporary)
        (image,) = _json(archive, "manifest.json")
        layers = [_layer(archive, layer, folder, epoch) for layer in image["Layers"]]
        described = _config(_json(archive, image["Config"]), layers, labels, epoch)
        config = _blob(folder, CONFIG, described)
        manifest = _blob(folder, MANIFEST, _manifest(config, layers, labels))
        names = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
        platform = {key: described[key] for key in ("architecture", "os")}
        entry = manifest.descriptor | {"platform": platform, "annotations": names}
        _write_layout(target, entry, [*layers, config, manifest], epoch)
    return manifest.digest


def layers(archive: Path) -> Iterator[tarfile.TarFile]:
    """The layers of an OCI archive, the lowest first, as tars that are read from beginning to
    end."""
    with tarfile.open(archive) as layout:
        for layer in _only_manifest(layout)["layers"]:
            stream = layout.extractfile(_place(layer["digest"]))
            with tarfile.open(fileobj=stream, mode="r|gz") as tar:
                yield tar


def config(archive: Path) -> dict[str, Any]:
    """The configuration of an OCI archive's image."""
    with tarfile.open(archive) as layout:
        found: dict[str, Any] = _json(layout, _place(_only_manifest(layout)["config"]["digest"]))
    return found


def _only_manifest(layout: tarfile.TarFile) -> Any:
    (entry,) = _json(layout, "index.json")["manifests"]
    return _json(layout, _place(entry["digest"]))


def platform(archive: Path) -> str:
    """Operating system and architecture of an OCI archive's image, such as linux-amd64."""
    found = config(archive)
    return f"{found['os']}-{found['architecture']}"


def _layer(archive: tarfile.TarFile, name: str, folder: Path, epoch: int) -> Blob:
    """A settled and compressed layer."""

    def change(entry: tarfile.TarInfo) -> bool:
        settle(entry, epoch)
        return not LEFT_OUT.fullmatch(entry.name)

    path = folder / name.replace("/", "-")
    with (
        path.open("wb") as file,
        tarfile.open(fileobj=archive.extractfile(name), mode="r:") as source,
    ):
        packed = Hashed(file)
        with gzip_stream(packed) as stream:
            plain = Hashed(stream)  # type: ignore[arg-type]
            with tar_stream(plain) as tar:
                copy_entries(source, tar, change)
    return Blob(path, LAYER, packed.digest, packed.size, plain.digest)


def _config(
    docker: dict[str, Any], layers: list[Blob], labels: dict[str, str], epoch: int
) -> dict[str, Any]:
    """The configuration without a history, which tells of the building machine."""
    settings = dict(docker["config"])
    settings["Env"] = [
        variable for variable in settings.get("Env") or [] if variable not in BUILD_ENVIRONMENT
    ]
    settings["Labels"] = labels
    return {
        "architecture": docker["architecture"],
        "os": docker["os"],
        "created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }


def _manifest(config: Blob, layers: list[Blob], labels: dict[str, str]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor,
        "layers": [layer.descriptor for layer in layers],
        "annotations": labels,
    }


def _blob(folder: Path, kind: str, content: dict[str, Any]) -> Blob:
    path = folder / kind.replace("/", "-")
    with path.open("wb") as file:
        hashed = Hashed(file)
        hashed.write(_encoded(content))
    return Blob(path, kind, hashed.digest, hashed.size)


def _write_layout(target: Path, entry: dict[str, Any], blobs: list[Blob], epoch: int) -> None:
    index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [entry]}
    small: dict[str, dict[str, Any]] = {
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
        "index.json": index,
    }
    with target.open("wb") as file, tar_stream(file) as tar:
        for name, content in small.items():
            tar.addfile(_entry(name, len(_encoded(content)), epoch), BytesIO(_encoded(content)))
        for digest, blob in sorted({blob.digest: blob for blob in blobs}.items()):
            with blob.path.open("rb") as stream:
                tar.addfile(_entry(_place(digest), blob.size, epoch), stream)


def _entry(name: str, size: int, epoch: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = size, epoch
    return entry


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _place(digest: str) -> str:
    """Where a layout has a blob."""
    return f"blobs/{digest.replace(':', '/')}"


def _json(archive: tarfile.TarFile, name: str) -> Any:
    stream = archive.extractfile(name)
    assert stream is not None
    return json.load(stream)
