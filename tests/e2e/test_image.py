"""The trainer's image has what a GPU run compiles and loads late, as a pod of the operator's making
finds it.

There is no GPU, and torch lacks CUDA's libraries here: stubs stand in for them, NCCL's too, and no
kernel runs.
"""

import json
from pathlib import Path

import pytest
import yaml

from grpo_api.job import parse_spec
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_operator.pods.pod_spec import PodDefaults, pod_spec
from grpo_operator.pods.roles import roles
from harness.fixtures import AnyCluster
from harness.images import native_parts
from harness.images.recipes import Image
from tests.unit.operator_world import PLAN, SPEC

pytestmark = pytest.mark.slow

NAME = "native-parts"
ARCHITECTURES = ("80", "120")
"""Two suffice: what assembles code for Blackwell is a program of its own, and of the others each
does the same."""


def test_a_pod_compiles_and_loads_what_a_gpu_run_needs(
    node_cluster: AnyCluster, trainer_image: Image
) -> None:
    (role, *_), pods = (
        roles(parse_spec(SPEC | {"imagePullPolicy": "Never"}), PLAN),
        PodDefaults(image=trainer_image.name),
    )
    spec = pod_spec(NAME, role, {}, pods)
    spec["containers"][0]["command"] = [
        "python",
        "-c",
        Path(native_parts.__file__).read_text(),
        *ARCHITECTURES,
    ]
    pod = {"metadata": {"name": NAME, "annotations": {PLAN_ANNOTATION: "{}"}}, "spec": spec}
    manifest = yaml.safe_dump({"apiVersion": "v1", "kind": "Pod"} | pod)
    node_cluster.kubectl("apply", "-f", "-", input=manifest)
    node_cluster.wait(
        "the pod",
        "get",
        "pod",
        NAME,
        "-o",
        "jsonpath={.status.phase}",
        expect="Succeeded",
        seconds=300,
    )
    found = json.loads(node_cluster.kubectl("logs", NAME).splitlines()[-1])
    node_cluster.kubectl("delete", "pod", NAME, "--wait=false")
    assert found["user"] == spec["securityContext"]["runAsUser"]
    assert {"launch", "load_binary"} <= set(found["driver"])
    assert found["kernels"].keys() == set(ARCHITECTURES)
    assert found["deepspeed"] == "cuda"
    assert found["bitsandbytes"] == ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"]
