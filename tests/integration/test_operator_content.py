"""A bad object, a namespace that is gone, a server that misbehaves: the operator goes on, says so,
serves all others.

Each of these ended the process of the first version for everybody, and some again after every
restart.
"""

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_JOB, LABEL_UID
from harness.client import ApiStatusError
from harness.cluster import Cluster
from harness.definitions import definition_change
from harness.fixtures import serve_grpojobs
from tests.generated import cases
from tests.integration.operator_bench import GRPOJOBS, PODS, Bench
from tests.integration.operator_thread import OperatorThread, operating, quiet_for

PODS_MADE = cases(30, gate=30)
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def unreadable(operator: OperatorThread, resource: str) -> int:
    """What the metric says of a kind."""
    pattern = rf'grpo_operator_unreadable_objects{{resource="{resource}"}} ([0-9.]+)'
    found = re.search(pattern, operator.page("metrics")[1])
    return int(float(found[1])) if found else 0


def stray(name: str, **labels: str) -> dict[str, Any]:
    """A pod that somebody made by hand, and that no node will take."""
    container = {"name": "main", "image": "example/any:1"}
    return {
        "metadata": {"name": name, "labels": {LABEL_JOB: "x", **labels}},
        "spec": {"containers": [container], "nodeSelector": {"no": "node"}},
    }


def test_a_pod_with_a_broken_index_costs_itself_only(bench: Bench) -> None:
    with bench.operating() as operator:
        bench.post(PODS, stray("stranger", **{LABEL_INDEX: "abc"}))
        bench.wait("the metric", lambda: unreadable(operator, "pods") == 1)
        bench.submit()
        bench.wait_running()
    with bench.operating() as again:
        assert unreadable(again, "pods") == 1
        bench.submit("second")
        bench.wait_running("second")
        bench.delete(PODS, "stranger", gracePeriodSeconds=0)
        bench.wait("the metric", lambda: unreadable(again, "pods") == 0)
        assert again.page("healthz")[0] == 200


@pytest.mark.seeded
def test_any_label_that_the_api_server_takes_costs_at_most_its_pod(
    bench: Bench, chance: random.Random
) -> None:
    words = ["", "0", "1", "-1", "abc", "007", "1.5", "9" * 20, "9" * 63, "A.b-c_d", "NaN", "true"]
    taken = 0
    with bench.operating() as operator:
        for number in range(PODS_MADE):
            labels = {key: chance.choice(words) for key in (LABEL_INDEX, LABEL_ATTEMPT, LABEL_UID)}
            pod = stray(f"stray-{number}", **{LABEL_JOB: chance.choice(["x", "run", ""]), **labels})
            taken += _taken(partial(bench.post, PODS, pod))
        assert taken > PODS_MADE // 3
        bench.submit()
        bench.wait_running()
        assert 0 < unreadable(operator, "pods") < taken
    assert bench.children() == ["run-1"]


Change = Callable[[dict[str, Any]], None]


def redefine(bench: Bench, change: Change) -> None:
    """Changes the schema of a GRPOJob's status in the definition."""
    definition = bench.get(f"{CRD}/grpojobs.grpo.dev")
    change(
        definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"][
            "properties"
        ]
    )
    definition["metadata"].pop("managedFields", None)
    with definition_change(bench.cluster):
        bench.client.request("PUT", f"{CRD}/grpojobs.grpo.dev", definition)


@pytest.fixture
def restored(grpo_cluster: Cluster) -> Iterator[None]:
    """Puts the definition back in the end."""
    yield
    serve_grpojobs(grpo_cluster)


@pytest.mark.usefixtures("restored")
def test_a_status_of_a_newer_version_is_left_alone_and_told(bench: Bench) -> None:
    """As after `helm rollback`: a later release knew a phase that this one doesn't, and wrote
    it."""
    with bench.operating():
        bench.submit()
        bench.wait_running()
    redefine(bench, lambda status: status["phase"]["enum"].append("Draining"))
    bench.patch(GRPOJOBS, "run/status", {"status": {"phase": "Draining"}})
    with bench.operating() as operator:
        bench.wait("the condition", lambda: bench.condition("Readable")[0] == "False")
        assert "Draining" in bench.condition("Readable")[2]
        assert unreadable(operator, "grpojobs") == 1
        bench.submit("other")
        bench.wait_running("other")
        assert bench.status()["phase"] == "Draining"
        assert bench.children() == ["run-1"]
        assert quiet_for(operator, 3.0) == {}
        bench.patch(GRPOJOBS, "run/status", {"status": {"phase": "Running"}})
        bench.wait("the condition", lambda: bench.condition("Readable")[0] == "True")
        bench.wait("the metric", lambda: unreadable(operator, "grpojobs") == 0)
        assert bench.status()["attempt"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
def test_what_an_older_definition_drops_is_not_written_for_ever(bench: Bench) -> None:
    """As after an upgrade of the operator without its definition: the API server drops what it
    doesn't know."""
    redefine(bench, lambda status: status.pop("pods"))
    with bench.operating(status_interval=0.2) as operator:
        bench.submit()
        bench.wait_running()
        quiet_for(operator, 2.0)
        assert quiet_for(operator, 3.0) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
def test_a_report_that_the_api_server_denies_keeps_no_decision_back(bench: Bench) -> None:
    redefine(
        bench,
        lambda status: status["pods"]["items"]["properties"]["phase"].update({"enum": ["Pending"]}),
    )
    with bench.operating() as operator:
        bench.submit(activeDeadlineSeconds=60)
        bench.wait_running()
        bench.wait_phase("Failed", hurry=True)
        assert bench.condition("Failed")[1] == "DeadlineExceeded"
        # one more for each pod that ends meanwhile, denied with the report and empty without
        assert quiet_for(operator, 3.0).get(("PATCH", "grpojobs"), 0) <= 4


def _taken(write: Callable[[], Any]) -> bool:
    """Whether the API server takes it; what is invalid it refuses with 422."""
    try:
        write()
    except ApiStatusError as error:
        if error.status != 422:
            raise
        return False
    return True


def _grant(bench: Bench, user: str) -> None:
    """Gives the user everything in the namespace, and nothing outside: as a namespaced install of
    the chart does."""
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    group = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}"
    bench.post(f"{group}/roles", {"metadata": {"name": user}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
    bench.post(
        f"{group}/rolebindings",
        {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]},
    )


def test_a_deleted_namespace_takes_no_other_down(
    bench: Bench, grpo_cluster: Cluster, tmp_path: Path
) -> None:
    doomed, user = Bench(grpo_cluster, bench.client), f"user-{bench.namespace}"
    for one in (bench, doomed):
        _grant(one, user)
    plane = grpo_cluster.control_plane
    kubeconfig = tmp_path / "kubeconfig"
    plane.authority.kubeconfig(kubeconfig, plane.url, user, f"/CN={user}")
    chosen: dict[str, Any] = {
        "namespaces": (bench.namespace, doomed.namespace),
        "kubeconfig": str(kubeconfig),
    }
    with operating(grpo_cluster, resync=1.0, **chosen) as operator:
        doomed.submit()
        doomed.wait_running()
        bench.client.request("DELETE", f"/api/v1/namespaces/{doomed.namespace}")
        detail = f"pods/{doomed.namespace}"
        bench.wait("the detail", lambda: detail in operator.page("readyz")[1])
        bench.submit()
        bench.wait_running()
        assert operator.page("readyz")[0] == 200
        assert operator.page("healthz")[0] == 200
    with operating(grpo_cluster, **chosen) as again:
        assert detail in again.page("readyz")[1]
        bench.submit("second")
        bench.wait_running("second")


@pytest.mark.usefixtures("restored")
def test_a_definition_that_goes_and_comes_back_is_followed_again(
    bench: Bench, grpo_cluster: Cluster
) -> None:
    with operating(grpo_cluster) as operator:
        bench.submit()
        bench.wait_running()
        bench.client.request("DELETE", f"{CRD}/grpojobs.grpo.dev")
        bench.wait("the detail", lambda: "grpojobs/*" in operator.page("readyz")[1])
        assert operator.page("healthz")[0] == 200
        grpo_cluster.kubectl("apply", "--server-side", "-f", "crds/grpojob.yaml")
        bench.wait("it to be served", lambda: operator.page("readyz") == (200, "ok"))
        # by an event, for the next LIST is minutes away
        bench.wait("the API server to take one", lambda: bench.submit("back"))
        bench.wait_running("back")


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
def test_the_operator_may_come_before_the_definition(bench: Bench, grpo_cluster: Cluster) -> None:
    bench.client.request("DELETE", f"{CRD}/grpojobs.grpo.dev")
    bench.wait("it to be gone", lambda: not bench.exists(CRD, "grpojobs.grpo.dev"))
    early = OperatorThread(grpo_cluster)
    early.begin()
    try:
        bench.wait("the detail", lambda: "grpojobs/*" in early.page("readyz")[1])
        assert (early.page("readyz")[0], early.page("healthz")[0]) == (503, 200)
        grpo_cluster.kubectl("apply", "--server-side", "-f", "crds/grpojob.yaml")
        bench.wait("it to be ready", lambda: early.page("readyz") == (200, "ok"))
        bench.wait("the API server to take one", lambda: bench.submit("late"))
        bench.wait_running("late")
    finally:
        early.stop()
