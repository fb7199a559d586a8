"""A release's image archive is what containerd imports: nodes run it by its name, as the very image
that we wrote."""

import json
import tarfile
from pathlib import Path

import pytest

from harness.fixtures import AnyCluster
from harness.images.archives import write_pause_image
from harness.programs.build import toolchain
from tools.release import oci

pytestmark = pytest.mark.slow

NAME = "release-image"
IMAGE = "localhost/release-image:1.2.3"


def test_nodes_run_an_imported_image_and_know_its_digest(
    node_cluster: AnyCluster, tmp_path: Path
) -> None:
    docker, archive = tmp_path / "docker.tar", tmp_path / "oci.tar"
    write_pause_image([toolchain(("pause",)).program("pause")], IMAGE, docker)
    digest = oci.write_archive(
        docker, archive, IMAGE, {"org.opencontainers.image.version": "1.2.3"}, 1_700_000_000
    )
    node_cluster.load(archive)
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME},
        "spec": {"containers": [container]},
    }
    node_cluster.kubectl("create", "-f", "-", input=json.dumps(pod))
    node_cluster.wait(
        "the pod", "get", "pod", NAME, "-o", "jsonpath={.status.phase}", expect="Running"
    )
    running = json.loads(node_cluster.kubectl("get", "pod", NAME, "-o", "json"))["status"][
        "containerStatuses"
    ][0]
    node_cluster.kubectl("delete", "pod", NAME, "--grace-period=0", "--force")
    with tarfile.open(archive) as layout:
        (manifest,) = [
            layout.extractfile(entry)
            for entry in layout
            if entry.name.endswith(digest.partition(":")[2])
        ]
        assert manifest
        assert running["imageID"] == json.load(manifest)["config"]["digest"]
