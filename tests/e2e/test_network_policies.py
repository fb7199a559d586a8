"""The operator's NetworkPolicy on real nodes: a gang works behind it, and a stranger's pod reaches
nothing.

A rendezvous without a password is as private as the network makes it.
"""

import itertools
import json

import pytest

from harness import stack
from harness.fixtures import AnyCluster
from harness.images.recipes import python_image
from harness.jobs import Jobs, Object, progress
from harness.programs.processes import until

pytestmark = pytest.mark.slow

STRANGERS = "strangers"
PORTS = ("8080", "29500")
"""Of rank 0: progress with its samples, and the rendezvous."""
LONG = {"maxSteps": 600}
OPEN: Object = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "everybody"},
    "spec": {"podSelector": {}, "ingress": [{}]},
}
"""What the owner of the namespace may add: policies only ever let in more."""
KNOCK = """
import socket, sys
address, *ports = sys.argv[1:]
for port in ports:
    try:
        socket.create_connection((address, int(port)), timeout=3).close()
        print(port, "open")
    except OSError as error:
        print(port, type(error).__name__)
"""


def knock(cluster: AnyCluster, name: str, address: str) -> dict[str, str]:
    """What a pod of another namespace meets at each of the ports."""
    inside = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": python_image().name,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", KNOCK, address, *PORTS],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {"restartPolicy": "Never", "securityContext": inside, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    own = ("--namespace", STRANGERS)
    cluster.kubectl("create", *own, "--filename", "-", input=json.dumps(pod))
    cluster.wait(
        name, "get", "pod", name, *own, "-o", "jsonpath={.status.phase}", expect="Succeeded"
    )
    return dict(line.split(" ", 1) for line in cluster.kubectl("logs", name, *own).splitlines())


def test_a_gang_works_behind_the_operators_policy_and_a_stranger_reaches_nothing(
    installed: AnyCluster, jobs: Jobs
) -> None:
    installed.load(python_image().archive)
    stack.create_namespace(installed, STRANGERS)
    jobs.create("private", LONG)
    job = jobs.wait_step("private", 2)  # its ranks have met, and the operator has asked rank 0
    rank0 = next(pod["name"] for pod in job["status"]["pods"] if pod["index"] == 0)
    address = jobs.kubectl("get", "pod", rank0, "-o", "jsonpath={.status.podIP}")
    assert knock(installed, "behind", address) == dict.fromkeys(PORTS, "TimeoutError")
    jobs.wait_step("private", progress(jobs.get("private"))["step"] + 1)
    jobs.kubectl("create", "--filename", "-", stdin=json.dumps(OPEN))
    names = (f"let-in-{number}" for number in itertools.count())
    try:
        until(
            "the owner's policy to be in force",
            lambda: knock(installed, next(names), address) == dict.fromkeys(PORTS, "open"),
        )
    finally:
        jobs.kubectl("delete", "networkpolicy", OPEN["metadata"]["name"])
    jobs.kubectl("delete", "grpojob", "private")
    installed.kubectl("delete", "namespace", STRANGERS, "--wait=false")
