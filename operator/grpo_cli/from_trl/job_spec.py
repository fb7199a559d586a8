"""Makes the GRPOJob of a TRL run: model, data, rewards and adapter beside GRPOConfig's fields."""

import re
from typing import Any

from grpo_api.text.contract import API_VERSION, KIND, MAX_JOB_NAME
from grpo_api.text.quantity import parameter_count
from grpo_planner.model.catalogue import lookup_shape

from .config_fields import ConfigFields
from .dataset_reader import ROWS_FILE
from .trl_run import (
    SET_MODEL,
    RewardUse,
    SpecBuilder,
    TrlError,
    TrlRun,
    TrlSetting,
    is_folder_name,
    metric_name,
)

GIB_PER_BILLION = 60
"""Size of the claim: two checkpoints of weights and optimizer, and the model, with room."""
LEAST_GIB = 30
LORA_FIELDS = {
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
}
PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"}
"""LoraConfig's own defaults, which differ from a job's."""
PEFT_MODULES = ["q_proj", "v_proj"]
"""What PEFT adapts of Llama, Qwen, Mistral and Gemma models where a script names no modules."""
UNWRITTEN = '"""Write the reward functions here."""\n'
LOADING = ("model", "dtype", "torch_dtype", "revision", "trust_remote_code")
"""Arguments of from_pretrained that a job has."""
TOKENS = ("token", "use_auth_token")
QUANTISING = ("load_in_4bit", "load_in_8bit", "quantization_config")
WITHOUT_EFFECT = ("use_cache", "low_cpu_mem_usage", "device_map", "cache_dir")


def job_documents(
    run: TrlRun, name: str, processes: int | None, model: str | None, parameters: str | None
) -> list[dict[str, Any]]:
    """The objects of a run: a ConfigMap where rewards are Python files, and the GRPOJob. The run's
    notes then say what was not taken.

    Raises:
        TrlError: nothing says which model is trained.
    """
    builder = SpecBuilder(run)
    _put_model(run, builder, name, model, parameters)
    _put_dataset(run, builder, name)
    _put_rewards(run, builder, name)
    ConfigFields(run, builder, processes).translate()
    _put_adapter(run, builder)
    _put_checkpoint(builder)
    spec = builder.finish()
    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    for use in run.rewards:
        if use.is_in_config_map:  # pods wait for a ConfigMap that is missing
            file = f"{use.function.partition(':')[0]}.py"
            run.reward_files.setdefault(file, UNWRITTEN)
    if not run.reward_files:
        return [job]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-rewards"},
            "data": dict(sorted(run.reward_files.items())),
        },
        job,
    ]


def job_name(source: str) -> str:
    """A name for the job of a file's name."""
    stem = source.rpartition("/")[2].partition(".")[0].lower()
    cleaned = re.sub("[^a-z0-9]+", "-", stem)[: MAX_JOB_NAME - len("-rewards")].strip("-")
    return cleaned or "grpo"


def _put_model(
    run: TrlRun, builder: SpecBuilder, name: str, model: str | None, parameters: str | None
) -> None:
    model_setting = TrlSetting(model, 0) if model else run.model
    if model:
        run.notes = [note for note in run.notes if not note.advice.endswith(SET_MODEL)]
    if model_setting is None or not isinstance(model_setting.value, str):
        raise TrlError(
            f"{run.source} does not say which model is trained, or computes it: add --model ID"
        )
    if is_folder_name(model_setting.value):
        folder = model_setting.value.rstrip("/").rpartition("/")[2]
        builder.set_field("model.name", f"/models/{folder}")
        builder.set_field("model.volume", {"claimName": f"{name}-model"})
        advice = "put the folder on the claim of model.volume"
        run.note(model_setting.line, "model", model_setting.value, advice)
    else:
        builder.set_field("model.name", model_setting.value)
    if parameters:
        builder.set_field("model.parameters", parameters)
    elif lookup_shape(model_setting.value) is None:
        advice = "its size is not known: set model.parameters, or give --parameters SIZE"
        run.note(model_setting.line, "model", model_setting.value, advice)
    if run.chat_template is not None:
        template = run.chat_template
        builder.set_field("model.chatTemplate", template.value, "chat_template", template)
    for key, argument in run.model_arguments.items():
        _put_loading(run, builder, key, key, argument)
    initial = run.config.get("model_init_kwargs")
    if initial is None or initial.value is None:
        return
    if not isinstance(initial.value, dict):
        advice = "write its entries into the job"
        run.note(initial.line, "model_init_kwargs", initial.value, advice)
        return
    for key, value in initial.value.items():
        name = f"model_init_kwargs[{key}]"
        _put_loading(run, builder, str(key), name, TrlSetting(value, initial.line))


def _put_loading(
    run: TrlRun, builder: SpecBuilder, key: str, name: str, setting: TrlSetting
) -> None:
    """One argument of from_pretrained; `name` is that of messages."""
    value = setting.value
    if key in ("dtype", "torch_dtype"):
        # float32 weights under autocast, which are TRL's default, are dtype Auto.
        if value == "bfloat16":
            builder.set_field("training.dtype", value, name, setting)
        elif value != "float32":
            advice = "the weights are loaded as training.dtype says: Auto, bfloat16 or float32"
            run.note(setting.line, name, value, advice)
    elif key == "revision":
        if value not in (None, "main"):
            builder.set_field("model.revision", value, name, setting)
    elif key == "trust_remote_code":
        builder.set_field("model.trustRemoteCode", value, name, setting)
    elif setting.is_set and key not in WITHOUT_EFFECT:
        run.note(setting.line, name, "" if key in TOKENS else value, loading_refusal(key))


def loading_refusal(key: str) -> str:
    """Why a job has no such argument of from_pretrained; empty if it has one."""
    if key in TOKENS:
        return "set model.tokenSecretRef"
    if key in QUANTISING:
        return "the base is trained in its full precision, not quantised"
    return "" if key in LOADING else "the trainer loads the model with its own settings"


def _put_dataset(run: TrlRun, builder: SpecBuilder, name: str) -> None:
    use = run.dataset
    is_made = use.is_made_by_script or not (use.name or use.files)
    paths = [ROWS_FILE] if is_made else list(use.files)
    if paths:
        files = {"volume": {"claimName": f"{name}-data"}, "paths": paths}
        builder.set_field("dataset.files", files)
    if is_made:
        return
    for field in () if paths else ("name", "config", "split", "revision"):
        value = getattr(use, field)
        if value is not None:
            setting = TrlSetting(value, 0)
            builder.set_field(f"dataset.{field}", value, f"dataset {field}", setting)
    if use.columns:
        builder.set_field("dataset.columns", dict(use.columns))
    if use.prompt_column != "prompt":
        builder.set_field("dataset.promptColumn", use.prompt_column)
    if use.system_prompt is not None:
        builder.set_field("dataset.systemPrompt", use.system_prompt)


def _put_rewards(run: TrlRun, builder: SpecBuilder, name: str) -> None:
    weights = _weights(run)
    entries: list[dict[str, Any]] = []
    names: set[str] = set()
    for position, use in enumerate(run.rewards):
        entry: dict[str, Any] = {}
        shown = metric_name(use.name)
        if shown not in names:
            entry["name"] = shown
        names.add(shown)
        if position < len(weights) and weights[position] != 1:
            entry["weight"] = weights[position]
        if use.function:
            entry["python"] = {"function": use.function}
            if use.is_in_config_map:
                entry["python"]["configMap"] = {"name": f"{name}-rewards"}
        else:
            entry["model"] = _reward_model(run, use, f"{name}-reward-{position}", position)
        entries.append(entry)
    if not entries:
        entries = [{"python": {"function": "rewards:reward"}}]
        advice = "no reward was found: rewards names a function that you have to write"
        run.note(0, "rewards", "", advice)
    builder.set_field("rewards", entries)


def _weights(run: TrlRun) -> list[float]:
    setting = run.config.get("reward_weights")
    if setting is None or setting.value is None:
        return []
    numbers = setting.value if isinstance(setting.value, list) else []
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    are_allowed = are_numbers and all(abs(number) <= 1e6 for number in numbers)
    if not are_allowed or len(numbers) != len(run.rewards):
        advice = f"set the weight of each of the job's {len(run.rewards)} rewards"
        run.note(setting.line, "reward_weights", setting.value, advice)
        return []
    return numbers


def _reward_model(run: TrlRun, use: RewardUse, claim: str, position: int) -> dict[str, Any]:
    """A reward model as TRL loads and calls it: all completions of a generation in one pass."""
    name, line = use.name, use.line
    entry: dict[str, Any] = {"name": name}
    if is_folder_name(name):
        entry["name"] = f"/rewards/{position}/{name.rstrip('/').rpartition('/')[2]}"
        entry["volume"] = {"claimName": claim}
        advice = "put the folder on the claim of rewards[].model.volume"
        run.note(line, "reward model", name, advice)
    initial = run.config.get("model_init_kwargs")
    loading = initial.value if initial and isinstance(initial.value, dict) else {}
    dtype = loading.get("dtype")
    if dtype == "float32":
        entry["dtype"] = dtype
    elif dtype != "bfloat16":
        advice = "TRL takes the dtype of its file, a job bfloat16: set rewards[].model.dtype"
        run.note(line, "reward model", name, advice)
    batch = run.value("per_device_train_batch_size")
    accumulation = run.value("gradient_accumulation_steps")
    if isinstance(batch, int) and isinstance(accumulation, int):
        entry["batchSize"] = min(max(1, batch * accumulation), 4096)
    if lookup_shape(name) is None:
        advice = "its size is not known: set rewards[].model.parameters"
        run.note(line, "reward model", name, advice)
    return entry


def _put_adapter(run: TrlRun, builder: SpecBuilder) -> None:
    """An adapter only where the script has one: a job's own default may take one."""
    if run.lora is None:
        builder.set_field("adapter.use", "Never")
        return
    builder.set_field("adapter.use", "Always")
    for field, path in LORA_FIELDS.items():
        setting = run.lora.get(field, TrlSetting(PEFT_DEFAULTS[field], 0))
        builder.set_field(path, setting.value, field, setting)
    modules = run.lora.get("target_modules")
    if modules is None or modules.value is None:
        builder.set_field("adapter.targetModules", PEFT_MODULES)
        advice = "not given: PEFT's choice for Llama, Qwen, Mistral and Gemma models was taken"
        run.note(0, "adapter.targetModules", ", ".join(PEFT_MODULES), advice)
    else:
        is_text = isinstance(modules.value, str)
        names = [modules.value] if is_text else modules.value
        builder.set_field("adapter.targetModules", names, "target_modules", modules)
        if is_text and modules.value != "all-linear":
            advice = "PEFT takes a text as a pattern, a job as a module's name: list the names"
            run.note(modules.line, "target_modules", modules.value, advice)
    for field, setting in run.lora.items():
        is_known = field in LORA_FIELDS or field == "target_modules"
        is_default = field in PEFT_DEFAULTS and setting.value == PEFT_DEFAULTS[field]
        if is_known or is_default or not setting.is_set:
            continue
        run.note(setting.line, field, setting.value, adapter_refusal(field))


def adapter_refusal(field: str) -> str:
    """Why a job has no such field of LoraConfig; empty if it has one."""
    if field == "use_rslora":
        return "set adapter.alpha to lora_alpha times the square root of the rank"
    if field in LORA_FIELDS or field == "target_modules":
        return ""
    return "a job's adapter has rank, alpha, dropout and targetModules"


def _put_checkpoint(builder: SpecBuilder) -> None:
    """A claim of the job's own, by the model's size, where the trained model is kept."""
    declared = builder.get("model.parameters")
    shape = lookup_shape(builder.get("model.name"))
    count = shape.parameters if shape else 0
    if declared:
        try:
            count = parameter_count(declared)
        except ValueError:
            count = 0
    size = LEAST_GIB
    if builder.get("adapter.use") == "Never":
        size = max(size, round(GIB_PER_BILLION * count / 1e9 / 10) * 10)
    builder.set_field(
        "checkpoint.volumeClaimTemplate", {"size": f"{size}Gi", "accessMode": "ReadWriteOnce"}
    )
