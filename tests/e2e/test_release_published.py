"""A release is published to a registry and a package index on this machine, then used from these
alone: by the install page's commands on a fresh cluster, from the operator to an exported model.

The trainer's image is the slim one: the shipped Dockerfile's, with a torch that lacks CUDA's
libraries, since the whole one would take 15 GB three times.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import stack
from harness.access import Access
from harness.cluster import Cluster
from harness.images import recipes
from harness.programs import registries
from harness.programs.build import toolchain, user_commands
from harness.programs.processes import run
from harness.settings import ClusterSettings
from tools.release import chart, publish, python_package
from tools.release.__main__ import write_facts, write_image
from tools.release.source import Release, current

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTALL_PAGE = ROOT / "docs" / "how-to" / "operate" / "install.md"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
NAMESPACE = "newcomer"
PASSWORD = {"COSIGN_PASSWORD": "rehearsal"}
IMAGES = {
    "grpo-operator": recipes.operator_image,
    "grpo-trainer": recipes.slim_trainer_image,
}
PLAIN_HTTP = {
    "cosign verify ": "cosign verify --allow-http-registry --insecure-ignore-tlog ",
    "helm install ": "helm install --plain-http ",
}
"""Options that only a registry on this machine needs, by the command of the page."""


@dataclass(frozen=True)
class Published:
    """A fresh cluster, and what a user of the release has beside it."""

    cluster: Cluster
    release: Release
    files: Path
    index: str

    def environment(self, home: Path) -> dict[str, str]:
        """A user's: a virtual environment in `home`, kubectl, helm and cosign, and no source."""
        programs = [home / "venv" / "bin", user_commands(), toolchain(("cosign",)).path]
        inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return inherited | {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "PIP_EXTRA_INDEX_URL": f"{self.index}/simple/",
        }


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    """The release of this checkout, published; no image has been brought to the cluster's node."""
    folder = tmp_path_factory.mktemp("published")
    settings = ClusterSettings(nodes=1, storage_class=True)
    with (
        Cluster.create(f"published-{os.getpid()}", settings) as cluster,
        registries.serve_registry(folder, cluster.host) as registry,
        registries.serve_index(folder) as index,
    ):
        cluster.pull_plainly_from(registry)
        release = current(f"{registry}/team", "https://example.test")
        files = folder / "release"
        files.mkdir()
        _make(release, files)
        key = _make_key(folder)
        to = publish.Destination(index, key, rehearsal=True)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("COSIGN_PASSWORD", PASSWORD["COSIGN_PASSWORD"])
            publish.publish(files, to, print)
        yield Published(cluster, release, files, index)


def _make(release: Release, files: Path) -> None:
    """What `make release` makes, but for the plugin's archives and the checks."""
    python_package.build(files, release.epoch)
    digests = {}
    for name, image in IMAGES.items():
        _, digests[name] = write_image(release, name, image().archive, files)
    chart.build(release, files, digests)
    write_facts(release, digests, files)


def _make_key(folder: Path) -> Path:
    cosign = toolchain(("cosign",)).program("cosign")
    variables = [f"{name}={text}" for name, text in PASSWORD.items()]
    prefix = folder / "cosign"
    run("env", *variables, cosign, "generate-key-pair", "--output-key-prefix", prefix)
    return folder / "cosign.key"


def commands(page: Path, heading: str) -> str:
    """The commands of the first block below a heading of the page."""
    section = page.read_text().partition(f"\n## {heading}\n")[2]
    block = re.search(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert block is not None, f"{page.name} has no commands below {heading!r}"
    return block[1]


def test_the_install_pages_commands_lead_to_an_exported_model(
    published: Published, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    (tmp_path / "cosign.pub").write_bytes((published.files.parent / "cosign.pub").read_bytes())
    script = commands(INSTALL_PAGE, "From a release")
    own = PLAIN_HTTP | {"<registry>": published.release.registry}
    for text, replacement in own.items():
        assert text in script
        script = script.replace(text, replacement)
    _type(published, tmp_path, script)
    stack.create_namespace(published.cluster, NAMESPACE)
    _type(
        published,
        tmp_path,
        f"kubectl config set-context --current --namespace {NAMESPACE}\n"
        f"kubectl apply -f {QUICKSTART}\n"
        "grpo wait quickstart --timeout 600\n"
        "grpo wait quickstart-evaluation --timeout 600\n"
        "grpo export quickstart --to model\n"
        "grpo verify model\n",
    )
    assert (tmp_path / "model" / "model.safetensors").exists()


def _type(published: Published, home: Path, script: str) -> str:
    """What the commands print that a user types in his home."""
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=home,
        env=published.environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_registry_has_the_digests_that_were_signed(published: Published) -> None:
    facts = publish.read_facts(published.files)
    for name, digest in facts.images.items():
        image = f"docker://{facts.registry}/{name}:{facts.version}"
        inspect = ("inspect", "--tls-verify=false", "--format", "{{.Digest}}", image)
        assert run(registries.skopeo(), *inspect).strip() == digest


def test_pods_run_the_published_images(published: Published) -> None:
    access: Access = published.cluster
    shown = access.kubectl(
        *("get", "pods", "--all-namespaces"),
        *("--output", "jsonpath={.items[*].spec.containers[*].image}"),
    )
    assert {image.rpartition("/")[0] for image in shown.split()} == {published.release.registry}
