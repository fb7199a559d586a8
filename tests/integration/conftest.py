"""Fixtures of the integration tests: a real API server with its controllers, shared by the whole session."""

from collections.abc import Iterator

import pytest

from tests.cluster.fixtures import AnyCluster, api_level


@pytest.fixture(scope="session")
def api_cluster() -> Iterator[AnyCluster]:
    """An API level cluster: `.kubeconfig`, `.url`, `.kubectl(…)`, `.stop_apiserver()`, `.start_apiserver()`."""
    with api_level() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def crd_cluster(api_cluster: AnyCluster) -> AnyCluster:
    """The same cluster, knowing GRPOJobs; no operator runs in it."""
    api_cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "crds/grpojob.yaml")
    api_cluster.kubectl("wait", "--for=condition=Established", "crd/grpojobs.grpo.dev")
    return api_cluster
