"""Fixtures of the end-to-end tests: real kubelets that run real pods, with the product installed,
once per session.

The cluster, the images and the demo's content are made once; each test works with jobs of its own
names.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from examples.demo.__main__ import EXAMPLE
from examples.demo.prepare import fill_volume
from harness import stack
from harness.access import Access
from harness.fixtures import AnyCluster, node_level
from harness.images import recipes as images
from harness.jobs import Jobs
from harness.programs.build import user_commands
from harness.programs.cache import REPOSITORY

NAMESPACE = "team"
CLAIM = "first-job"
MONITORING = "trainerPods.networkPolicy.monitoring[0].ipBlock.cidr"


def api_server(access: Access) -> str:
    """The API server's address, which is this machine's: from there come its questions to pods, and
    those by proxy."""
    config = yaml.safe_load(access.kubeconfig.read_text())
    return socket.gethostbyname(str(urlsplit(config["clusters"][0]["cluster"]["server"]).hostname))


def grpo(access: Access, *arguments: str) -> str:
    """What the command line prints on a user's machine."""
    paths = {
        "PYTHONPATH": str(REPOSITORY / "operator"),
        "PATH": f"{user_commands()}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "grpo_cli", *arguments]
    done = subprocess.run(
        command, env=access.environment | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[AnyCluster]:
    """A node level cluster: `.kubeconfig`, `.kubectl(…)`, `.helm(…)`, `.load(image)`,
    `.stop_apiserver()`."""
    with node_level() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def trainer_image(node_cluster: AnyCluster) -> images.Image:
    """The training image, on every node."""
    image = images.light_trainer_image()
    node_cluster.load(image.archive)
    return image


@pytest.fixture(scope="session")
def installed(node_cluster: AnyCluster, trainer_image: images.Image) -> AnyCluster:
    """The cluster with the operator installed by Helm, in a namespace of the restricted
    standard."""
    operator = images.operator_image()
    node_cluster.load(operator.archive)
    stack.install_operator(
        node_cluster, operator, trainer_image, f"{MONITORING}={api_server(node_cluster)}/32"
    )
    return node_cluster


@pytest.fixture(scope="session")
def jobs(installed: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The first example's jobs, in a restricted namespace with its model, its problems and a volume
    for checkpoints."""
    stack.create_namespace(installed, NAMESPACE)
    volume: Path = tmp_path_factory.mktemp("volume")
    for folder in (volume.parent.parent, volume.parent, volume):
        folder.chmod(0o755)  # pytest's folders are private, training pods are not root
    stack.host_volume(installed, NAMESPACE, CLAIM, volume)
    fill_volume(volume)
    return Jobs(installed, NAMESPACE, yaml.safe_load(EXAMPLE.read_text()), volume / "checkpoints")
