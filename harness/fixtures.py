"""The clusters that test sessions share; tests/integration and tests/e2e turn them into pytest
fixtures.

Each yields a cluster of its own that dies with the test process, or the one that
GRPO_TEST_KUBECONFIG names.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from .access import ExternalCluster
from .cluster import Cluster
from .controlplane import ControlPlaneSettings
from .definitions import definition_change, is_discovered
from .images.recipes import CONTAINER_ENGINE_PACKAGES, CONTAINER_SITE_PACKAGES
from .images.vllm_packages import engine_packages
from .images.wheels import site_packages
from .programs.processes import until
from .settings import ClusterSettings, GpuSettings

DEFINITION = Path(__file__).parents[1] / "crds" / "grpojob.yaml"
CLASS_DEFINITION = DEFINITION.with_name("grpojobclass.yaml")
CLASSES = "grpojobclasses.grpo.dev"
AnyCluster = Cluster | ExternalCluster
NODES = 2
GPUS_PER_NODE = 4


@contextmanager
def api_level(name: str = "api") -> Iterator[AnyCluster]:
    """Yield a control plane on loopback; Jobs create pods and pods get nodes, if there are any (see
    kwok)."""
    with _cluster(name, ClusterSettings()) as cluster:
        yield cluster


def training_settings(*, engines: bool = True) -> ClusterSettings:
    """Two real nodes that claim four GPUs each, ready for the light trainer image, with engines or
    without.

    A lost node is noticed after 40 s, so the API server may be away for 20 s.
    """
    shown = {str(site_packages()): CONTAINER_SITE_PACKAGES}
    if engines:
        shown[str(engine_packages())] = CONTAINER_ENGINE_PACKAGES
    return ClusterSettings(
        NODES,
        gpus=GpuSettings(GPUS_PER_NODE),
        control_plane=ControlPlaneSettings(node_grace_seconds=40),
        shown=shown,
    )


@contextmanager
def node_level(name: str = "e2e") -> Iterator[AnyCluster]:
    """Yield a cluster by `training_settings`, with a default StorageClass."""
    with _cluster(name, replace(training_settings(), storage_class=True)) as cluster:
        yield cluster


@contextmanager
def _cluster(name: str, settings: ClusterSettings) -> Iterator[AnyCluster]:
    lent = os.environ.get("GRPO_TEST_KUBECONFIG")
    if lent:
        yield ExternalCluster(Path(lent))
        return
    with Cluster.create(f"{name}-{os.getpid()}", settings) as cluster:
        yield cluster


def serve_grpojobs(cluster: AnyCluster) -> None:
    """Makes the API server know GRPOJobs by the definition of this repository."""
    with definition_change(cluster):
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(DEFINITION))


@contextmanager
def job_classes_served(cluster: AnyCluster) -> Iterator[None]:
    """Let the API server know GRPOJobClasses while the block runs; elsewhere Helm brings them."""
    cluster.kubectl("apply", "--server-side", "-f", str(CLASS_DEFINITION))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(CLASS_DEFINITION))
    until("GRPOJobClasses to be discovered", lambda: is_discovered(cluster, CLASSES))
    yield
    cluster.kubectl("delete", "-f", str(CLASS_DEFINITION))
