"""What a release is made of: one version, images whose digest follows from their content, what is
in them, the plugin.

Built images, kubectl and clusters are in tests/integration/test_release.py and
tests/e2e/test_release_images.py.
"""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.images.base import keep_licenses
from harness.images.recipes import BUILD_ENVIRONMENT
from harness.programs.processes import ClusterError
from tools.release import archives, oci, plugin, publish, sbom, source

ROOT = Path(__file__).parents[2]
EPOCH = 1_700_000_000
NAME = "localhost/some:1.2.3"
RELEASE = source.Release("1.2.3", "c0ffee", EPOCH, source.LOCAL, "https://example.test/v1.2.3")
APT = "Package: apt\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.6.1\n"
GONE = "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
RICH = "Metadata-Version: 2.4\nName: Rich_Text\nVersion: 15.0.0\nLicense-Expression: MIT\n\nText\n"


@dataclass(frozen=True)
class Entry:
    """A file, or a hard link to one, in a layer."""

    path: str
    content: bytes = b""
    mtime: int = EPOCH
    owner: str = "root"
    link: str = ""


def layer(entries: Iterable[Entry]) -> bytes:
    """A layer's tar, in the order given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mtime, info.uname, info.size = entry.mtime, entry.owner, len(entry.content)
            if entry.link:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, entry.link, 0
            tar.addfile(info, io.BytesIO(entry.content))
    return buffer.getvalue()


def docker_archive(path: Path, *layers: bytes) -> Path:
    """A docker archive as buildah writes it."""
    settings = {"Entrypoint": ["/run"], "Env": ["PATH=/bin", *BUILD_ENVIRONMENT]}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": settings,
        "created": "2026-01-01T00:00:00Z",
    }
    names = [f"layer-{number}.tar" for number in range(len(layers))]
    files = dict(zip(names, layers, strict=True)) | {
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(
            [{"Config": "config.json", "RepoTags": [NAME], "Layers": names}]
        ).encode(),
    }
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def released(folder: Path, *layers: bytes) -> tuple[Path, str]:
    """The OCI archive of these layers, and its digest."""
    target = folder / "image.tar"
    labels = {"org.opencontainers.image.version": "1.2.3"}
    return target, oci.write_archive(
        docker_archive(folder / "docker.tar", *layers), target, NAME, labels, EPOCH
    )


def blobs(archive: Path) -> dict[str, bytes]:
    """The files of an archive."""
    with tarfile.open(archive) as tar:
        return {entry.name: stream.read() for entry in tar if (stream := tar.extractfile(entry))}


PATHS = st.lists(
    st.text("abc/é", min_size=1, max_size=8).filter(lambda p: "//" not in p),
    unique=True,
    max_size=6,
)


@st.composite
def twice(draw: st.DrawFn) -> tuple[list[Entry], list[Entry]]:
    """The entries of one layer as two builds write them: other times, owners and order."""
    paths = [f"f/{path.strip('/')}" for path in draw(PATHS) if path.strip("/")]
    first = [Entry(path, draw(st.binary(max_size=40))) for path in dict.fromkeys(paths)]
    later = [
        replace(entry, mtime=EPOCH + draw(st.integers(0, 10**6)), owner="build") for entry in first
    ]
    links = [Entry(f"a/{number}", link=entry.path) for number, entry in enumerate(first)]
    return [*first, *links], [*draw(st.permutations(later)), *links]


@given(builds=twice())
def test_an_images_digest_follows_from_its_content(
    tmp_path_factory: pytest.TempPathFactory, builds: tuple[list[Entry], list[Entry]]
) -> None:
    made = [released(tmp_path_factory.mktemp("image"), layer(entries)) for entries in builds]
    assert made[0][0].read_bytes() == made[1][0].read_bytes()
    files = {entry.path: entry.content for entry in builds[0]}
    seen: list[str] = []
    for content in oci.layers(made[0][0]):
        for entry in content:
            seen.append(entry.name)
            if entry.islnk():
                assert entry.linkname in seen, "a link needs what it names before it"
            else:
                stream = content.extractfile(entry)
                assert stream
                assert stream.read() == files[entry.name]
    assert sorted(seen) == sorted(files)


def test_every_blob_is_what_its_name_says(tmp_path: Path) -> None:
    archive, digest = released(
        tmp_path, layer([Entry("a", b"x")]), layer([Entry("etc/hostname", b"builder")])
    )
    found = blobs(archive)
    for name, content in found.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]
    (entry,) = json.loads(found["index.json"])["manifests"]
    manifest = json.loads(found[f"blobs/{digest.replace(':', '/')}"])
    assert entry["digest"] == digest
    assert entry["annotations"]["io.containerd.image.name"] == NAME
    for part in (manifest["config"], *manifest["layers"]):
        assert len(found[f"blobs/{part['digest'].replace(':', '/')}"]) == part["size"]
    config = oci.config(archive)
    assert config["config"]["Env"] == ["PATH=/bin"], "what only the build needs is gone"
    assert config["created"] == "2023-11-14T22:13:20+00:00"
    assert len(config["rootfs"]["diff_ids"]) == 2
    assert "hostname" not in str([entry.name for part in oci.layers(archive) for entry in part])
    assert oci.platform(archive) == "linux-amd64"


def test_a_bill_names_what_a_container_would_see(tmp_path: Path) -> None:
    site = "opt/venv/lib/python3.11/site-packages"
    lower = [
        Entry("var/lib/dpkg/status", f"{APT}\n{GONE}".encode()),
        Entry(f"{site}/rich-15.dist-info/METADATA", RICH.encode()),
        Entry(f"{site}/old-1.dist-info/METADATA", b"Name: old\nVersion: 1\n"),
        Entry("usr/lib/python3/dist-packages/six-1.dist-info/METADATA", b"Name: six\nVersion: 1\n"),
    ]
    upper = [
        Entry(f"{site}/.wh.old-1.dist-info"),
        Entry(f"{site}/new-2.dist-info/METADATA", b"Name: new\nVersion: 2\n"),
    ]
    archive, digest = released(tmp_path, layer(lower), layer(upper))
    bills = []
    for number in range(2):
        target = tmp_path / f"{number}.cdx.json"
        assert sbom.write(RELEASE, archive, "some", digest, target) == 3
        bills.append(target.read_text())
    assert bills[0] == bills[1]
    bill = json.loads(bills[0])
    assert [one["purl"] for one in bill["components"]] == [
        "pkg:deb/debian/apt@2.6.1?arch=amd64&distro=bookworm",
        "pkg:pypi/new@2",
        "pkg:pypi/rich-text@15.0.0",
    ]
    assert bill["components"][2]["licenses"] == [{"license": {"id": "MIT"}}]
    assert bill["metadata"]["component"]["bom-ref"] == f"some@{digest}"


@pytest.mark.parametrize("mark", [".wh..wh..opq", "dpkg/.wh.status", ".wh.dpkg"])
def test_what_a_layer_removes_is_in_no_bill(tmp_path: Path, mark: str) -> None:
    archive, digest = released(
        tmp_path,
        layer([Entry("var/lib/dpkg/status", APT.encode())]),
        layer([Entry(f"var/lib/{mark}")]),
    )
    with pytest.raises(ClusterError, match="no record of installed packages"):
        sbom.write(RELEASE, archive, "some", digest, tmp_path / "bill.json")


def test_of_documentation_the_licenses_stay(tmp_path: Path) -> None:
    for name in ("a/copyright", "a/changelog.gz", "b/README", "b/examples/one"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c").symlink_to("a")
    keep_licenses(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "a",
        "a/copyright",
        "c",
    ]


def test_all_files_name_one_version() -> None:
    source.require_one_version(ROOT)
    heading = source.newest_heading((ROOT / "CHANGELOG.md").read_text())
    assert heading == "Unreleased" or heading.startswith(
        source.stated_versions(ROOT)["pyproject.toml"]
    )


PLACES_OF_VERSIONS = (
    "charts/grpo-operator/Chart.yaml",
    "README.md",
    "docs/how-to/operate/images.md",
    "docs/how-to/operate/install.md",
)


@pytest.mark.parametrize("place", PLACES_OF_VERSIONS)
def test_a_file_with_another_version_is_named(tmp_path: Path, place: str) -> None:
    version = source.stated_versions(ROOT)["pyproject.toml"]
    for name in ("pyproject.toml", *PLACES_OF_VERSIONS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    source.require_one_version(tmp_path)
    (tmp_path / place).write_text((tmp_path / place).read_text().replace(version, "9.9.9"))
    with pytest.raises(
        ClusterError, match=rf"version {re.escape(version)}; write it also into {place}.*9\.9\.9"
    ):
        source.require_one_version(tmp_path)


@pytest.mark.parametrize(
    ("changelog", "heading"),
    [
        ("# C\n\n## [0.2.0] - 2026-01-01\n\n## 0.1.0\n", "0.2.0"),
        ("## Unreleased\n", "Unreleased"),
        ("# C\n", ""),
    ],
)
def test_the_newest_heading_is_the_first(changelog: str, heading: str) -> None:
    assert source.newest_heading(changelog) == heading


def test_a_release_without_a_registry_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="make release"):
        publish.read_facts(tmp_path)
    facts = publish.Facts("1.2.3", "c0ffee", source.LOCAL, {})
    (tmp_path / publish.FACTS_FILE).write_text(json.dumps(asdict(facts)))
    with pytest.raises(ClusterError, match="REGISTRY="):
        publish.read_facts(tmp_path)


def test_a_file_that_was_changed_or_is_gone_is_not_published(tmp_path: Path) -> None:
    for name in ("install.yaml", "grpo.yaml", "release.json"):
        (tmp_path / name).write_text(name)
    archives.write_checksums(tmp_path)
    publish.check_files(tmp_path)
    (tmp_path / "install.yaml").write_text("changed")
    (tmp_path / "grpo.yaml").unlink()
    with pytest.raises(ClusterError, match=r": grpo\.yaml, install\.yaml differ from SHA256SUMS"):
        publish.check_files(tmp_path)


@pytest.mark.realtime
def test_checksums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "a b.tar").write_bytes(b"content")
    archives.write_checksums(tmp_path)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert (
        subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        == "a b.tar: OK\n"
    )
    (tmp_path / "a b.tar").write_bytes(b"other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_pythons_share_what_is_pure_and_differ_in_what_is_native(tmp_path: Path) -> None:
    for python in ("311", "312"):
        (tmp_path / python / "a.dist-info").mkdir(parents=True)
        (tmp_path / python / "a.py").write_text("pure")
        (tmp_path / python / f"core.cpython-{python}.so").write_text(python)
        (tmp_path / python / "a.dist-info/WHEEL").write_text(python)
        plugin.merge(tmp_path / python, tmp_path / "lib")
    names = {path.name for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    assert names == {"a.py", "core.cpython-311.so", "core.cpython-312.so", "WHEEL"}
    (tmp_path / "312/a.py").write_text("other")
    with pytest.raises(ClusterError, match=r"a\.py differs between versions of Python"):
        plugin.merge(tmp_path / "312", tmp_path / "lib")


@pytest.fixture
def launched(tmp_path: Path) -> Path:
    """The launcher, reached by a link from another folder, with a library that says who runs it."""
    store, links = tmp_path / "the store", tmp_path / "links"
    (store / "lib").mkdir(parents=True)
    links.mkdir()
    (store / "lib/pydantic_core.py").write_text("")
    (store / "lib/__main__.py").write_text("import sys; print(sys.argv[1:])")
    (store / "kubectl-grpo").write_text(plugin.launcher(plugin.PLATFORMS[0], ("3.11", "3.14")))
    (store / "kubectl-grpo").chmod(0o755)
    (links / "kubectl-grpo").symlink_to("../the store/kubectl-grpo")
    return links / "kubectl-grpo"


def launch(program: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "PYTHONPATH": "/nowhere"}
    return subprocess.run(
        [program, "plan", "a b"], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.realtime
def test_the_launcher_finds_its_library_through_links(launched: Path) -> None:
    done = launch(launched, os.defpath)
    assert (done.returncode, done.stdout) == (0, "['plan', 'a b']\n"), done.stderr


@pytest.mark.realtime
def test_the_launcher_says_which_python_it_needs(launched: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "readlink"):
        (tools / name).symlink_to(shutil.which(name) or "")
    done = launch(launched, str(tools))
    assert done.returncode == 2
    assert "needs Python 3.11 to 3.14 as python3 on the PATH (linux-amd64)" in done.stderr


def test_the_manifest_of_the_plugin_names_each_archive_by_its_hash(tmp_path: Path) -> None:
    packed = {}
    for platform in plugin.PLATFORMS:
        packed[platform] = tmp_path / f"{platform.name}.tar.gz"
        packed[platform].write_text(platform.name)
    written = plugin.manifest(RELEASE, packed)
    assert written["spec"]["version"] == "v1.2.3"
    for entry, (platform, path) in zip(written["spec"]["platforms"], packed.items(), strict=True):
        assert entry["selector"] == {"matchLabels": {"os": platform.os, "arch": platform.arch}}
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert entry["uri"] == f"https://example.test/v1.2.3/{platform.name}.tar.gz"
