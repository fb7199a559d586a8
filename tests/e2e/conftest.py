"""Fixtures of the end-to-end tests: real kubelets that run real pods, shared by the whole session."""

from collections.abc import Iterator

import pytest

from tests.cluster.fixtures import AnyCluster, node_level


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[AnyCluster]:
    """A node level cluster: `.kubeconfig`, `.kubectl(…)`, `.helm(…)`, `.load(image)`, `.stop_apiserver()`."""
    with node_level() as cluster:
        yield cluster
