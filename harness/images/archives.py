"""Write images that hold a few files: docker archives, made without any image tool.

One is the sandbox image with programs of ours, which every pod needs before any other image; there
is no registry to pull it from.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_pause_image(programs: Sequence[Path], name: str, archive: Path) -> None:
    """Write the archive of the image `name` with the static programs in its root; the first is its
    entry point."""
    content = {program.name: program for program in programs}
    write_image(content, name, archive, {"Entrypoint": [f"/{programs[0].name}"]})


def write_image(
    content: dict[str, Path], name: str, archive: Path, settings: dict[str, Any]
) -> None:
    """Write the archive of the image `name` with these files and folders, by their paths in it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, source in content.items():
            tar.add(source, arcname=path)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        _add(tar, "manifest.json", json.dumps(manifest).encode())
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "layer.tar", layer.getvalue())


def _add(tar: tarfile.TarFile, name: str, blob: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(blob)
    tar.addfile(info, io.BytesIO(blob))
