"""Lists the Debian and Python packages of an image, as their installers recorded them, in a
CycloneDX document.

CycloneDX's own library writes it and checks it by its schema. The packages are read from the
published archive, so that the document can't describe another image.
"""

import re
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from packageurl import PackageURL

from harness.images.base import RELEASE
from harness.programs.processes import ClusterError

from . import oci
from .source import Release

RECORDS = re.compile(r"var/lib/dpkg/status|(?!usr/lib/python3/).*\.dist-info/METADATA")
"""Where installers say what they have installed; below usr/lib/python3 are Debian's own
packages."""
DPKG = "var/lib/dpkg/status"
REMOVED, ALL_REMOVED = ".wh.", ".wh..wh..opq"
"""How a layer says that a file, or all of a folder's, of the layers below is gone (OCI image-spec,
layer)."""
LONGEST_LICENSE = 100
"""Characters; some packages put the whole text into the field that names the license."""


def write(release: Release, archive: Path, name: str, digest: str, target: Path) -> int:
    """Write the document on the OCI archive of the image `name`; returns the number of packages.

    Raises:
        ClusterError: it found none, or the document does not meet CycloneDX's schema.
    """
    components = {str(one.purl): one for one in _packages(read_files(archive))}
    if not components:
        raise ClusterError(f"{archive.name}: no record of installed packages in it")
    image = Component(
        name=name, version=release.version, type=ComponentType.CONTAINER, bom_ref=f"{name}@{digest}"
    )
    bom = Bom(
        components=components.values(), serial_number=uuid5(NAMESPACE_URL, f"{name}@{digest}")
    )
    bom.metadata.component = image
    bom.metadata.timestamp = datetime.fromtimestamp(release.epoch, UTC)
    bom.register_dependency(image, components.values())
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    # The validator compiles a grammar on import, which takes two seconds of everything that imports
    # this module.
    from cyclonedx.validation.json import JsonStrictValidator

    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ClusterError(f"{target.name} is no CycloneDX document: {problem}")
    target.write_text(text + "\n")
    return len(components)


def read_files(archive: Path) -> dict[str, str]:
    """The installers' records of an OCI archive by their paths, as a container would see them."""
    found: dict[str, str] = {}
    for layer in oci.layers(archive):
        removed, added = _of_layer(layer)
        found = {path: text for path, text in found.items() if not path.startswith(removed)} | added
    return found


def _of_layer(layer: tarfile.TarFile) -> tuple[tuple[str, ...], dict[str, str]]:
    """Beginnings of paths that a layer removes, and the records that it adds."""
    removed, added = [], {}
    for entry in layer:
        folder, slash, name = entry.name.rpartition("/")
        if name == ALL_REMOVED:
            removed.append(folder + slash)
        elif name.startswith(REMOVED):
            gone = folder + slash + name.removeprefix(REMOVED)
            removed += [f"{gone}/", gone] if RECORDS.fullmatch(gone) else [f"{gone}/"]
        elif entry.isreg() and RECORDS.fullmatch(entry.name):
            stream = layer.extractfile(entry)
            added[entry.name] = stream.read().decode(errors="replace") if stream else ""
    return tuple(removed), added


def _packages(records: dict[str, str]) -> Iterator[Component]:
    for path, text in records.items():
        if path == DPKG:
            yield from (
                _debian(part)
                for part in text.split("\n\n")
                if "\nStatus: install ok installed\n" in part
            )
        else:
            yield _python(text)


def _debian(paragraph: str) -> Component:
    fields = dict(re.findall(r"^(Package|Version|Architecture): (.*)$", paragraph, re.MULTILINE))
    qualifiers = {"arch": fields["Architecture"], "distro": RELEASE}
    return _component(PackageURL("deb", "debian", fields["Package"], fields["Version"], qualifiers))


def _python(metadata: str) -> Component:
    headers = HeaderParser().parsestr(metadata)
    name = re.sub(r"[-_.]+", "-", headers["Name"]).lower()
    license = headers["License-Expression"] or headers["License"] or ""
    return _component(PackageURL("pypi", None, name, headers["Version"]), license)


def _component(purl: PackageURL, license: str = "") -> Component:
    named = 0 < len(license) <= LONGEST_LICENSE and "\n" not in license
    licenses = [LicenseFactory().make_from_string(license)] if named else []
    return Component(
        name=purl.name, version=purl.version, purl=purl, bom_ref=str(purl), licenses=licenses
    )
