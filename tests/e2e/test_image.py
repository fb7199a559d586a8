"""The trainer's image has what a GPU run compiles and loads late, as a pod of the operator's making
finds it.

There is no GPU, and no kernel runs. On the nodes torch lacks CUDA's libraries: stubs stand in for
them, NCCL's too. The image as GPU clusters run it has them, and vLLM; it is too large for a node
here, so its checks run in a container that the image builder makes.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from grpo_api.job import parse_spec
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_operator.pods.pod_spec import PodDefaults, pod_spec
from grpo_operator.pods.roles import roles
from harness.fixtures import AnyCluster
from harness.images import image_checks, native_parts, recipes
from harness.images.recipes import Image
from tests.unit.operator_world import PLAN, SPEC

pytestmark = pytest.mark.slow

ARCHITECTURES = ("80", "120")
"""Two suffice: what assembles code for Blackwell is a program of its own, and of the others each
does the same."""


def pod_of(image: str, name: str, script: ModuleType, *arguments: str) -> dict[str, Any]:
    """A pod of the operator's making that runs a script in the trainer's place."""
    (role, *_) = roles(parse_spec(SPEC | {"imagePullPolicy": "Never"}), PLAN)
    spec = pod_spec(name, role, {}, PodDefaults(image=image))
    text = Path(str(script.__file__)).read_text()
    spec["containers"][0]["command"] = ["python", "-c", text, *arguments]
    metadata = {"name": name, "annotations": {PLAN_ANNOTATION: "{}"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def printed_by(cluster: AnyCluster, pod: dict[str, Any]) -> dict[str, Any]:
    """The last line that a pod prints, which is JSON."""
    name = pod["metadata"]["name"]
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(pod))
    phase = ("get", "pod", name, "-o", "jsonpath={.status.phase}")
    cluster.wait("the pod", *phase, expect="Succeeded", seconds=300)
    found: dict[str, Any] = json.loads(cluster.kubectl("logs", name).splitlines()[-1])
    cluster.kubectl("delete", "pod", name, "--wait=false")
    return found


def test_a_pod_compiles_and_loads_what_a_gpu_run_needs(
    node_cluster: AnyCluster, trainer_image: Image
) -> None:
    pod = pod_of(trainer_image.name, "native-parts", native_parts, *ARCHITECTURES)
    found = printed_by(node_cluster, pod)
    assert found["user"] == pod["spec"]["securityContext"]["runAsUser"]
    assert {"launch", "load_binary"} <= set(found["driver"])
    assert found["kernels"].keys() == set(ARCHITECTURES)
    assert found["deepspeed"] == "cuda"
    assert found["bitsandbytes"] == ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"]


def test_a_pod_compiles_for_the_cpu_and_finds_what_nccl_opens_for_rdma(
    node_cluster: AnyCluster, trainer_image: Image
) -> None:
    found = printed_by(node_cluster, pod_of(trainer_image.name, "image-checks", image_checks, "90"))
    assert set(found["failures"].values()) == {"ModuleNotFoundError: No module named 'vllm'"}
    assert found["inductor"] is True
    assert all(size > 1000 for size in found["kernels"]["90"].values())
    assert found["rdma"] == list(image_checks.RDMA)
    assert found["nvcc"] is None, "vLLM would let FlashInfer compile"


def test_the_image_with_vllm_resolves_imports_and_compiles_everything() -> None:
    script = Path(image_checks.__file__).read_text()
    command = ("python3", "-c", script, "80", "90", "100")
    found = json.loads(recipes.run_in_image(recipes.trainer_image(), *command).splitlines()[-1])
    assert all(found["libraries"][folder] for folder in ("torch", "nvidia/nccl", "vllm"))
    assert found["unresolved"] == {}
    assert found["failures"] == {}
    assert found["inductor"] is True
    assert all(size > 1000 for sizes in found["kernels"].values() for size in sizes.values())
    assert found["rdma"] == list(image_checks.RDMA)
    assert found["nvcc"] is None
