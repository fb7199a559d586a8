"""What `make release` writes beside images, tried: the plugin by kubectl alone, the manifest by a
real API server.

The archives are of this machine's platform and Python only; `make release` writes all, and lets
krew install each.
"""

import platform
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from harness.fixtures import AnyCluster
from harness.images.archives import ARCHITECTURES
from harness.programs.processes import ClusterError, run
from tools.release import chart, checks, plugin, python_package
from tools.release.source import LOCAL, current

pytestmark = pytest.mark.slow

PLATFORM = next(
    one
    for one in plugin.PLATFORMS
    if (one.os, one.arch) == (platform.system().lower(), ARCHITECTURES[platform.machine()])
)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DIGESTS = {"grpo-operator": f"sha256:{'1' * 64}"}
RELEASE = replace(current("example.test/team", "https://example.test"), epoch=1_700_000_000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same release twice: its plugin and its chart; a build of the wheel compares two
    itself."""
    wheel, _ = python_package.build(tmp_path_factory.mktemp("python"), RELEASE.epoch)
    made = [tmp_path_factory.mktemp("release") for _ in range(2)]
    for folder in made:
        plugin.archive(RELEASE, wheel, folder, PLATFORM, (PYTHON,))
        chart.build(RELEASE, folder, DIGESTS)
    return made


def test_the_same_commit_makes_the_same_files(folders: list[Path]) -> None:
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]
    assert set(contents[0]) == {
        f"kubectl-grpo-{RELEASE.version}-{PLATFORM.name}.tar.gz",
        f"grpo-operator-{RELEASE.version}.tgz",
        "install.yaml",
    }


def test_kubectl_plans_with_nothing_but_the_plugin(folders: list[Path], tmp_path: Path) -> None:
    (packed,) = folders[0].glob("kubectl-grpo-*")
    checks.unpack(packed, tmp_path)
    assert checks.try_plugin(tmp_path, RELEASE.version) == RELEASE.version
    assert "grpo plan" in checks.kubectl_grpo(tmp_path, "plan", "--help")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server with the folder's files."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def index_of(manifest: Path, folder: Path) -> Path:
    """A krew index, which is a git repository, with this plugin."""
    plugins = folder / "plugins"
    plugins.mkdir(parents=True)
    shutil.copy(manifest, plugins / "grpo.yaml")
    git = ("git", "-C", folder, "-c", "user.name=team", "-c", "user.email=team@example.test")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "grpo")):
        run(*git, *command)
    return folder


@dataclass(frozen=True)
class Downloads:
    """What a downloads server and krew's index have of the plugin."""

    url: str
    manifest: Path
    index: Path
    packed: Path
    """The served archive."""

    def krew(self, root: Path, *arguments: str) -> None:
        """Run krew, with this index in the place of its own."""
        checks.krew(root, *arguments, KREW_DEFAULT_INDEX_URI=str(self.index))


@pytest.fixture
def downloads(folders: list[Path], tmp_path: Path) -> Iterator[Downloads]:
    """On this machine."""
    (packed,) = folders[0].glob("kubectl-grpo-*")
    folder = tmp_path / "downloads"
    folder.mkdir()
    served_archive = Path(shutil.copy(packed, folder))
    with served(folder) as url:
        manifest = folder / "grpo.yaml"
        published = plugin.manifest(replace(RELEASE, downloads=url), {PLATFORM: packed})
        manifest.write_text(yaml.safe_dump(published))
        index = index_of(manifest, tmp_path / "index")
        yield Downloads(url, manifest, index, served_archive)


def test_krew_installs_the_plugin_from_the_index_and_by_the_manifest_s_address(
    downloads: Downloads, tmp_path: Path
) -> None:
    checks.validate_manifest(downloads.manifest)
    for number, source in enumerate(["grpo", f"--manifest-url={downloads.url}/grpo.yaml"]):
        root = tmp_path / f"krew-{number}"
        downloads.krew(root, "install", source)
        assert checks.try_plugin(root / "bin", RELEASE.version) == RELEASE.version


def test_krew_refuses_an_archive_that_is_not_the_manifest_s(
    downloads: Downloads, tmp_path: Path
) -> None:
    downloads.packed.write_bytes(downloads.packed.read_bytes() + b"more")
    with pytest.raises(ClusterError, match="checksum"):
        downloads.krew(tmp_path / "krew", "install", "grpo")


def test_the_api_server_takes_the_manifest(folders: list[Path], api_cluster: AnyCluster) -> None:
    manifest = folders[0] / "install.yaml"
    objects = list(yaml.safe_load_all(manifest.read_text()))
    assert objects[0]["metadata"]["name"] == "grpo-system"
    api_cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(objects[0]))
    said = checks.dry_run(api_cluster, manifest)
    api_cluster.kubectl("delete", "namespace", "grpo-system", "--wait=false")
    assert len(said.splitlines()) == len(objects)
    assert "customresourcedefinition.apiextensions.k8s.io/grpojobs.grpo.dev" in said


def test_the_manifest_names_images_by_digest_and_registry(folders: list[Path]) -> None:
    objects = yaml.safe_load_all((folders[0] / "install.yaml").read_text())
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (
        container["image"]
        == f"example.test/team/grpo-operator:{RELEASE.version}@{DIGESTS['grpo-operator']}"
    )
    assert f"--trainer-image=example.test/team/grpo-trainer:{RELEASE.version}" in container["args"]
    assert LOCAL not in str(container)


def test_the_chart_tells_scanners_its_images_and_readers_its_values(folders: list[Path]) -> None:
    (package,) = folders[0].glob("grpo-operator-*.tgz")
    with tarfile.open(package) as archive:
        text = {
            name: archive.extractfile(f"grpo-operator/{name}")
            for name in ("Chart.yaml", "README.md")
        }
        about, readme = (file.read().decode() for file in text.values() if file)
    listed = yaml.safe_load(yaml.safe_load(about)["annotations"]["artifacthub.io/images"])
    names = ("grpo-operator", "grpo-trainer")
    assert listed == [
        {"name": name, "image": f"example.test/team/{name}:{RELEASE.version}"} for name in names
    ]
    assert "| `podSecurityContext.runAsNonRoot` | `true` |" in readme
