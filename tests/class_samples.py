"""GRPOJobClasses that must be accepted and ones that must be rejected, each with the reason in one
place.

The models (tests/unit/test_job_classes.py) and the real API server
(tests/integration/test_job_classes.py) are asked about the same specs.
"""

from typing import Any

from grpo_api.text.contract import API_VERSION, CLASS_KIND
from tests.samples import Bad, changed

CLASS: dict[str, Any] = {
    "default": {
        "image": "registry.example/grpo-trainer:1",
        "generation": {"engine": "Colocated", "engineArguments": {"maxNumSeqs": 256}},
        "checkpoint": {"volumeClaimTemplate": {"storageClassName": "efs"}},
    },
    "fixed": {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
        "placement": {
            "nodeSelector": {"pool": "h100"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        },
        "podTemplate": {
            "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-0"}},
            "spec": {"imagePullSecrets": [{"name": "registry"}], "runtimeClassName": "nvidia"},
        },
    },
    "limits": {
        "gpus": 16,
        "activeDeadlineSeconds": 86400,
        "priorityClassNames": ["low", "normal"],
        "requiredLabels": ["cost-center"],
    },
    "platform": {
        "resources": {"limits": {"rdma/hca": "1"}},
        "volumes": [{"name": "ca", "configMap": "ca", "mountPath": "/etc/proxy-ca"}],
        "gpuHourPrices": {"NVIDIA-H100-80GB-HBM3": 2.49},
    },
}
"""A class with all that a restricted namespace allows."""

ROOT = {"platform": {"securityContext": {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}}}}
GOOD_CLASSES: dict[str, dict[str, Any]] = {
    "all": CLASS,
    "empty": {},
    "root": ROOT,
    "host-network": {"platform": {"hostNetwork": True}},
    "plugin": {
        "platform": {
            "resources": {
                "requests": {"hugepages-2Mi": "5Gi"},
                "limits": {"hugepages-2Mi": "5Gi", "vpc.amazonaws.com/efa": 4},
            },
            "volumes": [
                {
                    "name": "nccl",
                    "hostPath": "/opt/nccl",
                    "mountPath": "/opt/nccl",
                    "subPath": "lib",
                }
            ],
        }
    },
    "unconfined": {"platform": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}},
    "groups": {"platform": {"securityContext": {"supplementalGroups": [44], "fsGroup": 10}}},
}


def job_class(name: str, spec: dict[str, Any], *, default: bool = False) -> dict[str, Any]:
    """A GRPOJobClass of that name."""
    metadata: dict[str, Any] = {"name": name}
    if default:
        metadata["annotations"] = {"grpojobclass.grpo.dev/is-default-class": "true"}
    return {"apiVersion": API_VERSION, "kind": CLASS_KIND, "metadata": metadata, "spec": spec}


def _bad(name: str, path: str, value: Any, says: str, *, at: str = "") -> Bad:
    """A class with one wrong field; `at`: the field that the answer names, if another."""
    return Bad(name, {path: value}, f"spec.{at or path}", says, CLASS)


_VOLUMES = "platform.volumes"
_CONTEXT = "platform.securityContext"
_LABELS = "default.podTemplate.metadata.labels"


def _volume(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "ca", "mountPath": "/etc/ca", **changes}]


BAD_CLASSES = (
    _bad("section", "defaults", {}, "unknown field|Extra"),
    _bad("sampling", "default.generation.stop", ["x"], "unknown field|Extra"),
    _bad("training", "fixed.training", {"beta": 0.1}, "unknown field|Extra"),
    _bad("model", "default.model", {"name": "x"}, "unknown field|Extra"),
    _bad("rewards", "fixed.rewards", [], "unknown field|Extra"),
    _bad("accelerator", "default.placement.accelerator", "CPU", "unknown field|Extra"),
    _bad("queue", "fixed.placement.queueName", "q", "unknown field|Extra"),
    _bad("init", "default.podTemplate.spec.initContainers", [], "unknown field|Extra"),
    _bad("pod-host-network", "fixed.podTemplate.spec.hostNetwork", True, "unknown field|Extra"),
    _bad("claim-size", "default.checkpoint.volumeClaimTemplate.size", "1Gi", "unknown field|Extra"),
    _bad("image-space", "default.image", "a b", "match"),
    _bad("image-number", "fixed.image", 7, "string"),
    _bad("pull-policy", "default.imagePullPolicy", "Sometimes", "Always"),
    _bad("engine", "default.generation.engine", "VLLM", "Transformers"),
    _bad("engine-auto", "fixed.generation.engine", "Auto", "Transformers"),
    _bad("arguments", "default.generation.engineArguments.maxNumSeqs", 0, "greater than or equal"),
    _bad("selector", "fixed.placement.nodeSelector", {"a b": "c"}, "key|pattern"),
    _bad("selector-value", "fixed.placement.nodeSelector", {"a": "b c"}, "match"),
    _bad("toleration", "fixed.placement.tolerations", [{"effect": "NoSchedule"}], "needs key"),
    _bad("priority", "default.placement.priorityClassName", "High", "match"),
    _bad("storage", "default.checkpoint.volumeClaimTemplate.storageClassName", "A", "match"),
    _bad("runtime", "default.podTemplate.spec.runtimeClassName", "", "at least 1"),
    _bad("account", "fixed.podTemplate.spec.serviceAccountName", "A", "match"),
    _bad("secret", "fixed.podTemplate.spec.imagePullSecrets", [{"name": "A"}], "match"),
    _bad("secret-less", "fixed.podTemplate.spec.imagePullSecrets", [{}], "[Rr]equired"),
    _bad(
        "label",
        "default.podTemplate.metadata.labels",
        {"grpo.dev/x": "1"},
        "belong to",
        at="default.podTemplate.metadata",
    ),
    _bad("env-owned", "fixed.env", [{"name": "GRPO_PLAN", "value": "x"}], "GRPO_"),
    _bad("env-two", "fixed.env", [{"name": "A", "value": "x", "valueFrom": {}}], "exactly|at most"),
    _bad("env-from", "default.envFrom", [{"prefix": "A"}], "exactly one of configMapRef"),
    _bad("gpus", "limits.gpus", 0, "greater than or equal"),
    _bad("gpus-text", "limits.gpus", "8", "integer"),
    _bad("deadline", "limits.activeDeadlineSeconds", -1, "greater than or equal"),
    _bad("priorities", "limits.priorityClassNames", ["A"], "match"),
    _bad("required", "limits.requiredLabels", ["a b"], "match"),
    _bad("limit", "limits.gpu", 8, "unknown field|Extra"),
    _bad("cpu", "platform.resources", {"limits": {"cpu": "4"}}, "plan's", at="platform"),
    _bad("gpu", "platform.resources", {"limits": {"nvidia.com/gpu": 1}}, "requested by the plan"),
    _bad("half", "platform.resources", {"limits": {"rdma/hca": "500m"}}, "whole pieces"),
    _bad("request", "platform.resources", {"requests": {"rdma/hca": 1}}, "must equal"),
    _bad("host", "platform.hostNetwork", "yes", "boolean"),
    _bad("privileged", f"{_CONTEXT}.privileged", True, "unknown field|Extra"),
    _bad("user", f"{_CONTEXT}.runAsUser", -1, "greater than or equal"),
    _bad("capability", f"{_CONTEXT}.capabilities", {"add": ["IPC_LOCK"]}, "only root", at=_CONTEXT),
    _bad("capability-case", _CONTEXT, {"runAsUser": 0, "capabilities": {"add": ["ipc"]}}, "match"),
    _bad("profile", f"{_CONTEXT}.seccompProfile", {"type": "Localhost"}, "localhostProfile"),
    _bad("profile-kind", f"{_CONTEXT}.seccompProfile", {"type": "None"}, "RuntimeDefault"),
    _bad("source", _VOLUMES, _volume(), "exactly one of hostPath"),
    _bad("sources", _VOLUMES, _volume(hostPath="/a", configMap="a"), "exactly one of hostPath"),
    _bad("host-path", _VOLUMES, _volume(hostPath="a"), "match"),
    _bad("host-path-up", _VOLUMES, _volume(hostPath="/a/../b"), "must not contain"),
    _bad(
        "mount-twice",
        _VOLUMES,
        [*_volume(configMap="a"), *_volume(configMap="b", name="b")],
        "different folders",
        at="platform",
    ),
    _bad("mount", _VOLUMES, _volume(configMap="a", mountPath="/tmp/x"), "outside of"),
    _bad("mount-up", _VOLUMES, _volume(configMap="a", mountPath="/a/../b"), "must not contain"),
    _bad("volume-name", _VOLUMES, _volume(configMap="a", name="x" * 51), "50"),
    _bad("twice", _VOLUMES, _volume(configMap="a") * 2, "[Dd]uplicate|more than one"),
    _bad("price", "platform.gpuHourPrices", {"H100": -1}, "greater than or equal"),
    _bad("price-text", "platform.gpuHourPrices", {"H100": "2"}, "number"),
)
assert len({bad.name for bad in BAD_CLASSES}) == len(BAD_CLASSES)
__all__ = ["BAD_CLASSES", "CLASS", "GOOD_CLASSES", "ROOT", "changed", "job_class"]
