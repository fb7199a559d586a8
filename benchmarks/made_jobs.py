"""GRPOJobs that have ended, made rather than run: a full spec, the planner's plan and all that a
status can say."""

from functools import cache
from typing import Any

from grpo_api.job import parse_spec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import STEP_PHASES
from grpo_api.status.status import ConditionType, GRPOJobStatus, Phase
from grpo_api.text.contract import API_VERSION, KIND
from grpo_api.text.units import GIB
from grpo_kube.objects.resources import Object
from grpo_kube.objects.times import timestamp
from grpo_operator.report.status import to_json
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job

PRODUCT = "NVIDIA-H100-80GB-HBM3"
PROMPT = (
    "Solve the problem. First think inside <reasoning> tags, then give nothing but the "
    "number in <answer> tags."
)
SPEC: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.2-1B-Instruct", "parameters": "1.24B"},
    "dataset": {
        "name": "openai/gsm8k",
        "config": "main",
        "promptColumn": "question",
        "systemPrompt": PROMPT,
    },
    "rewards": [
        {
            "format": {
                "pattern": r"<reasoning>[\s\S]*</reasoning>\s*<answer>[\s\S]*</answer>",
                "score": 0.5,
            }
        },
        {"accuracy": {"answerColumn": "answer", "score": 2.0}},
    ],
    "training": {"beta": 0.04, "numGenerations": 4, "maxCompletionLength": 786},
    "placement": {"gpus": {"min": 1, "max": 8}},
    "export": {"to": "None"},
}
GANG = 2
SAID: tuple[tuple[ConditionType, bool, str, str], ...] = (
    (ConditionType.ADMITTED, True, "Admitted", "attempt 1 has its place"),
    (
        ConditionType.PLANNED,
        True,
        "Planned",
        "Clone, all parameters, on 8 GPUs of one node; 3 other plans fit",
    ),
    (ConditionType.SCHEDULED, True, "AllPodsBound", "every pod of the gang has a node"),
    (ConditionType.RUNNING, False, "Finished", "the gang has ended"),
    (ConditionType.DEGRADED, False, "AsExpected", ""),
    (ConditionType.SUSPENDED, False, "NotSuspended", ""),
    (
        ConditionType.RECOVERABLE,
        True,
        "CheckpointVolume",
        "checkpoints outlive the pods on the claim of the job",
    ),
)


def job(namespace: str, name: str) -> Object:
    """A GRPOJob as a user would apply it."""
    metadata = {
        "namespace": namespace,
        "name": name,
        "labels": {"team": namespace, "example.com/cost-center": "4711"},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": SPEC}


def ended(name: str, number: int, at: float) -> Object:
    """The status of a job that ended at this unix time, one of ten badly."""
    failed, steps = number % 10 == 0, 1868 - number % 700
    result = "BadInput" if failed else "Succeeded"
    message = f"finished after step {steps}"
    kinds = (
        *SAID,
        (ConditionType.SUCCEEDED, not failed, result, message),
        (ConditionType.FAILED, failed, result, ""),
    )
    conditions = [
        {"type": kind, "status": str(true), "reason": reason, "message": said,
        "observedGeneration": 1,
         "lastTransitionTime": timestamp(at)}
        for kind, true, reason, said in kinds
    ]  # fmt: skip
    memory = {"predictedBytes": 21 * GIB, "measuredBytes": 21 * GIB - number, "ratio": "1.001"}
    status = GRPOJobStatus.model_validate({
        "observedGeneration": 1, "phase": Phase.FAILED if failed else Phase.SUCCEEDED,
        "conditions": conditions,
        "attempt": 1, "startTime": timestamp(at - 9000), "completionTime": timestamp(at),
        "activeSeconds": 8900,
        "jobUid": f"6f1f2c9a-0000-4000-8000-{number:012}", "plan": _plan(),
        "progress": {"step": steps, "totalSteps": steps, "percent": 100,
        "summary": f"{steps}/{steps}",
                     "etaSeconds": 0, "lastStepTime": timestamp(at - 5)},
        "metrics": {"kl": f"{0.01 + number % 97 / 1e4:.4g}", "reward": "1.84", "rewardStd": "0.31",
        "loss": "0.0021",
                    "gradNorm": "0.42", "completionLength": "203.5"},
        "memory": {**memory, "phases": dict.fromkeys(STEP_PHASES, memory),
        "reservedBytes": 23 * GIB,
                   "predictedDeviceBytes": 24 * GIB, "deviceBytes": 24 * GIB},
        "outcome": {"result": result, "step": steps, "totalSteps": steps, "attempt": 1,
        "message": message,
                    "metrics": {"kl": 0.0132, "reward": 1.84, "loss": 0.0021}},
        "pods": [{"name": f"{name}-1-{index}-x{number % 9973:04}", "index": index,
        "node": f"node-{number % 40}",
                  "phase": "Failed" if failed else "Succeeded",
                  "reason": result} for index in range(GANG)],
    })  # fmt: skip
    return to_json(status)


@cache
def _plan() -> ExecutionPlan:
    node = Node(
        gpu_product=PRODUCT, gpu_memory_mib=81559, gpus_free=8, gpus_total=8,
        host_memory_free=1024 * GIB,
        host_memory_total=1024 * GIB, cpu_free=128.0, cpu_total=128.0,
        node_selector=(("nvidia.com/gpu.product", PRODUCT),), count=4,
    )  # fmt: skip
    chosen = plan_job(parse_spec(SPEC), Inventory((node,))).chosen
    if chosen is None:
        raise RuntimeError("the planner has no plan for the benchmark's job")
    return chosen
