"""Fixtures of the integration tests: a real API server with its controllers, shared by the whole
session."""

from collections.abc import Iterator

import pytest

from harness.client import ApiClient
from harness.cluster import Cluster
from harness.fixtures import AnyCluster, api_level, serve_grpojobs
from harness.kueue import kueue_managing, serve_kueue_kinds
from harness.programs.processes import ClusterError
from tests.integration.gpu_bench import NODES, GpuBench
from tests.integration.kueue_bench import KueueBench
from tests.integration.operator_bench import Bench
from tests.integration.operator_thread import OperatorThread


@pytest.fixture(scope="session")
def api_cluster() -> Iterator[AnyCluster]:
    """An API level cluster: `.kubeconfig`, `.url`, `.kubectl(…)`, `.stop_apiserver()`,
    `.start_apiserver()`."""
    with api_level() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def crd_cluster(api_cluster: AnyCluster) -> AnyCluster:
    """The same cluster, knowing GRPOJobs; no operator runs in it."""
    serve_grpojobs(api_cluster)
    return api_cluster


@pytest.fixture(scope="session")
def grpo_cluster(crd_cluster: AnyCluster) -> Cluster:
    """The same cluster with nodes whose pods only pretend to run: kwok can't be put beside a lent
    cluster."""
    if not isinstance(crd_cluster, Cluster):
        raise ClusterError(
            "the operator's integration tests need a cluster of their own; unset "
            "GRPO_TEST_KUBECONFIG"
        )
    crd_cluster.add_kwok_nodes(0, 8)
    return crd_cluster


@pytest.fixture(scope="session")
def api(grpo_cluster: Cluster) -> ApiClient:
    """A client of its API server that costs no process per request."""
    return grpo_cluster.control_plane.client()


@pytest.fixture
def bench(grpo_cluster: Cluster) -> Bench:
    """A namespace of the test's own."""
    return Bench(grpo_cluster, grpo_cluster.control_plane.client())


@pytest.fixture
def gpu_bench(grpo_cluster: Cluster) -> Iterator[GpuBench]:
    """One with two nodes of four fake H100 each."""
    one = GpuBench(grpo_cluster, grpo_cluster.control_plane.client())
    names = [one.add_node(number) for number in range(2)]
    yield one
    for name in names:
        one.client.request("DELETE", f"{NODES}/{name}")


@pytest.fixture
def operator(grpo_cluster: Cluster, bench: Bench) -> Iterator[OperatorThread]:
    """The operator, for that namespace only."""
    with bench.operating() as one:
        yield one


@pytest.fixture(scope="session")
def kueue_cluster() -> Iterator[Cluster]:
    """A cluster of its own that knows Kueue's kinds too: beside it all others show that none of
    them is needed."""
    with api_level("kueue") as cluster:
        if not isinstance(cluster, Cluster):
            raise ClusterError(
                "Kueue's tests need a cluster of their own; unset GRPO_TEST_KUBECONFIG"
            )
        serve_grpojobs(cluster)
        serve_kueue_kinds(cluster)
        cluster.add_kwok_nodes(0, 8)
        yield cluster


@pytest.fixture
def kueue_bench(kueue_cluster: Cluster) -> Iterator[KueueBench]:
    """A namespace whose jobs a stand-in for Kueue's manager admits."""
    one = KueueBench(kueue_cluster, kueue_cluster.control_plane.client())
    yield one
    one.end_all()


@pytest.fixture(scope="module")
def managed_cluster() -> Iterator[Cluster]:
    """A cluster with Kueue's real manager at work."""
    with api_level("kueue-managed") as cluster:
        assert isinstance(cluster, Cluster)
        serve_grpojobs(cluster)
        cluster.add_kwok_nodes(0, 1)
        with kueue_managing(cluster):
            yield cluster
