"""A bench with GPUs: nodes that exist only in the API server, and jobs that need an exact number of
their GPUs.

Each bench has nodes of its own, which its jobs select by a label, so that tests don't disturb each
other.
"""

from typing import Any

from tests.integration.operator_bench import PODS, Bench

PRODUCT = "NVIDIA-H100-80GB-HBM3"
NODES = "/api/v1/nodes"


class GpuBench(Bench):
    """A namespace with two nodes of four fake H100 each, by default."""

    def add_node(self, number: int, gpus: int = 4, **labels: str) -> str:
        """A Ready node that only this bench's pods select."""
        name = f"{self.namespace}-{number}"
        offers = {"cpu": "64", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(gpus)}
        known = {
            "product": PRODUCT,
            "memory": "81559",
            "count": str(gpus),
            "compute.major": "9",
            "compute.minor": "0",
        }
        metadata = {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "bench": self.namespace}
            | {f"nvidia.com/gpu.{key}": value for key, value in (known | labels).items() if value},
        }
        self.client.request(
            "POST",
            NODES,
            {"metadata": metadata, "status": {"capacity": offers, "allocatable": offers}},
        )

        def ready() -> bool:
            node = self.client.get(f"{NODES}/{name}")
            conditions = node["status"].get("conditions", [])
            # the node controller takes its taint away a moment after the node is Ready
            untainted = not node["spec"].get("taints")
            return untainted and any(
                one["type"] == "Ready" and one["status"] == "True" for one in conditions
            )

        self.wait("the node", ready)
        return name

    def want(self, name: str, gpus: int, nodes: int = 1, **spec: Any) -> None:
        """Submits a job that needs exactly so many GPUs."""
        placement = {
            "gpus": {"min": gpus, "max": gpus},
            "nodes": nodes,
            "nodeSelector": {"bench": self.namespace},
            **spec.pop("placement", {}),
        }
        model = {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"}
        training = {"promptsPerStep": 8, "numGenerations": 6, **spec.pop("training", {})}
        self.submit(name, model=model, placement=placement, training=training, **spec)

    def foreign_pod(self, name: str, gpus: int) -> None:
        """A pod of somebody else on this bench's nodes."""
        resources = {"limits": {"nvidia.com/gpu": str(gpus)}}
        spec = {
            "nodeSelector": {"bench": self.namespace},
            "containers": [{"name": "c", "image": "x"}],
        }
        spec["containers"][0]["resources"] = resources  # type: ignore[index]
        self.post(PODS, {"metadata": {"name": name}, "spec": spec})
        self.wait("the foreign pod", lambda: self.get(PODS, name)["spec"].get("nodeName"))
