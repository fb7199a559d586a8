"""The trainer's promises on the real cluster: ZeRO-3 trains as DDP does, and wrong weights on one
node stop the gang.

Only two pods on two nodes have two copies of a file, two names to meet by and two termination
messages. The benchmark strategy_demo trains the whole demo under every strategy.
"""

import json
from pathlib import Path

import pytest

from harness import stack
from harness.fixtures import AnyCluster
from harness.images.recipes import Image
from harness.jobs import Jobs, condition, is_true, selected

pytestmark = pytest.mark.slow

STEPS = 6
NODES = ("node-0", "node-1")
NODE_FOLDER = "/var/lib/grpo-model"
"""On each node's own disk."""
CLAIM = "node-model"
FAULTS = {
    "one bit differs": (
        "data[-5] ^= 1",
        "WeightsDiffer",
        "model.norm.weight differs between ranks",
    ),
    "truncated": ("del data[-1000:]", "BadInput", "model.safetensors"),
}
SPOIL = """
import pathlib, shutil, sys
shutil.copytree("/in/model", "/out", dirs_exist_ok=True)
file = pathlib.Path("/out/model.safetensors")
data = bytearray(file.read_bytes())
exec(sys.argv[1])
file.write_bytes(data)
file.chmod(0o644)
"""


def test_zero3_and_ddp_agree_step_by_step(jobs: Jobs) -> None:
    logged = {}
    for name, strategy, stage in (("ddp", "Clone", 0), ("zero3", "Sharded", 3)):
        jobs.create(name, {"maxSteps": STEPS}, reference={"strategy": strategy})
        job = jobs.wait_succeeded(name)
        assert (job["status"]["plan"]["strategy"], job["status"]["plan"].get("zeroStage", 0)) == (
            strategy,
            stage,
        )
        logged[name] = [line for line in jobs.step_lines(job) if "kl" in line]
        jobs.kubectl("delete", "grpojob", name)
    assert [line["step"] for line in logged["ddp"]] == list(range(1, STEPS + 1))
    for ddp, zero3 in zip(logged["ddp"], logged["zero3"], strict=True):
        assert zero3["reward"] == ddp["reward"]
        assert zero3["kl"] == pytest.approx(ddp["kl"], rel=1e-4, abs=1e-7)
        assert zero3["grad_norm"] == pytest.approx(ddp["grad_norm"], rel=1e-3)
    assert logged["ddp"][-1]["kl"] > 0


@pytest.fixture
def node_model(installed: AnyCluster, jobs: Jobs) -> None:
    """A claim that is another folder on every node."""
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = shape | {
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": NODE_FOLDER, "type": "DirectoryOrCreate"},
    }
    volume["claimRef"] = {"namespace": jobs.namespace, "name": CLAIM}
    named = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": CLAIM},
        "spec": volume,
    }
    stack.apply(installed, named, stack.volume_claim(jobs.namespace, CLAIM, "1Gi", shape))


def put_model(cluster: AnyCluster, image: Image, shared: Path, node: str, spoil: str) -> None:
    """Copies the demo's model to the node's own folder, and spoils its weights there."""
    mounts = {"/in": str(shared), "/out": NODE_FOLDER}
    pod = {
        "restartPolicy": "Never",
        "nodeName": node,
        "containers": [
            {
                "name": "put",
                "image": image.name,
                "command": ["python3", "-c", SPOIL, spoil],
                "securityContext": {"runAsUser": 0},
                "volumeMounts": [{"name": path.strip("/"), "mountPath": path} for path in mounts],
            }
        ],
        "volumes": [
            {"name": path.strip("/"), "hostPath": {"path": source, "type": "DirectoryOrCreate"}}
            for path, source in mounts.items()
        ],
    }
    name = f"put-{node}"
    stack.apply(
        cluster, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
    )
    cluster.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout", "60s"
    )
    cluster.kubectl("delete", "pod", name, "--now")


@pytest.mark.usefixtures("node_model")
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_weights_on_one_node_stop_the_gang(
    installed: AnyCluster, jobs: Jobs, trainer_image: Image, fault: str
) -> None:
    spoil, result, named = FAULTS[fault]
    name = result.lower()
    for node, change in zip(NODES, ("pass", spoil), strict=True):
        put_model(installed, trainer_image, jobs.checkpoints.parent, node, change)
    model = {"name": "/models", "parameters": "77K", "volume": {"claimName": CLAIM}}
    jobs.create(name, {"maxSteps": STEPS}, model=model, restarts={"limit": 0})
    job = jobs.wait(name, "failed", lambda job: is_true(job, "Failed"))
    assert condition(job, "Failed")["reason"] == job["status"]["outcome"]["result"] == result, job[
        "status"
    ]["outcome"]
    assert named in condition(job, "Failed")["message"]
    assert jobs.wait_ended(name)
    states = [
        state for pod in jobs.list("pods", name) for state in pod["status"]["containerStatuses"]
    ]
    said = [
        json.loads(state["state"]["terminated"]["message"])
        for state in states
        if "terminated" in state["state"]
    ]
    assert result in [outcome["result"] for outcome in said]
    assert job["status"]["restarts"] == 0
    jobs.kubectl("delete", "grpojob", name)
    jobs.kubectl("wait", "--for=delete", "pods", "--timeout", "60s", *selected(name))
