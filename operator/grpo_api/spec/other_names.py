"""What the fields of TRL's, PEFT's and other trainers' configurations are called in a job's spec.

Who writes a first job knows these words. An unknown field is answered with the right one.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

from pydantic.alias_generators import to_snake

_CLAIMS = frozenset({"pvc", "claim", "claim_name", "persistent_volume_claim"})
_TOKENS = ("token", "api_key", "hf_token")
_WITH_TOKEN = ("model", "dataset", "http", "hub", "wandb", "mlflow", "trackio")
_ARGUMENTS = frozenset({"args", "arguments", "config", "kwargs", "parameters", "params"})
OTHER_NAMES = {
    "lora": "adapter",
    "peft": "adapter",
    "peft_config": "adapter",
    "r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lr": "training.learningRate",
    "epochs": "training.numTrainEpochs",
    "num_epochs": "training.numTrainEpochs",
    "total_epochs": "training.numTrainEpochs",
    "steps": "training.maxSteps",
    "batch_size": "training.promptsPerStep",
    "train_batch_size": "training.promptsPerStep",
    "kl_coef": "training.beta",
    "kl_coeff": "training.beta",
    "kl_loss_coef": "training.beta",
    "kl_penalty": "training.beta",
    "clip": "training.epsilon",
    "clip_range": "training.epsilon",
    "clip_ratio": "training.epsilon",
    "eps_clip": "training.epsilon",
    "scheduler": "training.lrSchedulerType",
    "reward_functions": "rewards",
    "enable_thinking": "model.chatTemplateKwargs",
    "group_size": "training.numGenerations",
    "num_samples": "training.numGenerations",
    "rollout_n": "training.numGenerations",
    "max_tokens": "training.maxCompletionLength",
    "max_new_tokens": "training.maxCompletionLength",
    "max_response_length": "training.maxCompletionLength",
    "response_length": "training.maxCompletionLength",
    "tensor_parallel_size": "generation.tensorParallel",
    "gpu_memory_utilization": "generation.memoryShare",
    "vllm": "generation.engine",
    "ref_model": "reference",
    "num_gpus": "placement.gpus",
    "gpu_count": "placement.gpus",
    "num_nodes": "placement.nodes",
    "max_restarts": "restarts.limit",
    "backoff_limit": "restarts.limit",
    "timeout": "activeDeadlineSeconds",
    "class": "jobClassName",
    "hf_token": "model.tokenSecretRef",
}
"""Names of verl, OpenRLHF, vLLM, PEFT and of Kubernetes' Job, in snake case."""

NEAR_NAMES: dict[tuple[int | str, ...], str] = {
    ("model", "path"): "name",
    ("dataset", "path"): "name",
    ("http", "endpoint"): "url",
    ("http", "uri"): "url",
    ("mlflow", "uri"): "url",
    ("mlflow", "tracking_uri"): "url",
    ("store", "bucket"): "url",
    ("model", "id"): "name",
    ("model", "size"): "parameters",
    ("model", "params"): "parameters",
    ("dataset", "subset"): "config",
    ("accuracy", "column"): "answerColumn",
    ("format", "regex"): "pattern",
    ("python", "file"): "configMap",
    ("placement", "gpu_type"): "gpuProduct",
    ("restarts", "max"): "limit",
    ("adapter", "enabled"): "use",
    ("adapter", "lora"): "use",
    ("resumeFrom", "job"): "grpoJob",
    ("volumeClaimTemplate", "storage"): "size",
    ("resources", "cpu"): "requests.cpu",
    ("resources", "memory"): "limits.memory",
    ("resources", "gpu"): "spec.placement.gpus",
    **dict.fromkeys(product(("volume", "cache"), ("name", "claim", "pvc")), "claimName"),
    **dict.fromkeys(product(_WITH_TOKEN, _TOKENS), "tokenSecretRef"),
}
"""By section and field, in snake case, the field of the same section that is meant."""


def _letters(name: str) -> str:
    """A name in any case, without underscores: to_snake parts `bf16` before its digits."""
    return name.replace("_", "").lower()


@cache
def _spellings() -> Mapping[str, str]:
    from .trl_places import SETTING_NAMES

    return {_letters(name): name for name in (*OTHER_NAMES, *SETTING_NAMES)}


def other_name_hint(location: Sequence[int | str]) -> str:
    """Say what to write instead of an unknown field of the spec or of one of its sections: half a
    sentence, empty where the name is no known one."""
    *parents, field = location
    if parents[-1:] == ["python"] and field in _ARGUMENTS:
        return "bind a reward's arguments in its file, as by functools.partial, and name the result"
    field_name = to_snake(str(field))
    if near := NEAR_NAMES.get((*parents[-1:], field_name)):
        return f"did you mean {near}?"
    if len(parents) > 1:
        return ""
    name = _spellings().get(_letters(field_name), field_name)
    if name in _CLAIMS and parents in (["checkpoint"], ["model"]):
        return f"did you mean spec.{parents[0]}.volume?"
    # Right specs need no table of TRL's fields.
    from .trl_places import place_of

    place = place_of(name)
    path = OTHER_NAMES.get(name) if place is None else place.path
    if place is not None and place.kind == "Refused":
        instead = f"; see spec.{path}" if path else ""
        return f"{place.reason}{instead}"
    return f"did you mean spec.{path}?" if path else ""
