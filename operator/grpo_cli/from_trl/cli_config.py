"""Reads the YAML file of `trl grpo --config`: the fields of GRPOConfig, ModelConfig and
GRPOScriptArguments, and a mixture of datasets, all at the top level."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_api.spec.trl_places import CLI_PLACES, FIELDS

from .reward_reader import metric_name
from .trl_run import RENAMED, ReadModule, RewardUse, TrlError, TrlRun, TrlSetting

BUILT_IN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Reward functions that TRL's command has under these names."""
OVERLONG = "get_soft_overlong_punishment"
_OVERLONG_FILE = '''"""Reward functions of `trl grpo`."""

from trl.rewards import get_soft_overlong_punishment

soft_overlong_punishment_reward = get_soft_overlong_punishment(
    max_completion_len=1280, soft_punish_cache=256
)
'''
_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""ModelConfig's fields, by LoraConfig's."""
LORA_DEFAULTS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""ModelConfig's defaults, which are not PEFT's."""


def read_config(values: Mapping[str, TrlSetting], source: str, read_module: ReadModule) -> TrlRun:
    """The run that a configuration describes, by the values of its keys.

    Raises:
        TrlError: it is accelerate's, or none of the keys is one of `trl grpo`.
    """
    if {"compute_environment", "distributed_type"} & set(values):
        raise TrlError(
            f"{source} configures `accelerate launch`: give the script or the YAML file of `trl "
            "grpo --config`, and num_processes by --processes"
        )
    setting_names = {*FIELDS, *CLI_PLACES}
    if not setting_names & set(values):
        raise TrlError(
            f"{source} has no setting of `trl grpo`: its keys are fields of GRPOConfig, "
            "ModelConfig and GRPOScriptArguments, such as model_name_or_path"
        )
    run = TrlRun(source)
    typed: dict[str, TrlSetting] = {}
    for former, setting in values.items():
        name = RENAMED.get(former, former)
        typed[name] = _parse_number(name, setting)
    for name, setting in typed.items():
        if name == "env":
            run.note(setting.line, name, "", "set spec.env; secrets go there by valueFrom")
        elif name in FIELDS or name not in CLI_PLACES:
            run.config[name] = setting
        elif CLI_PLACES[name].kind == "Refused" and setting.value:
            place = CLI_PLACES[name]
            fix = f"; use spec.{place.path}" if place.path else ""
            run.note(setting.line, name, setting.value, f"{place.reason}{fix}")
    _read_model(run, typed)
    _read_dataset(run, typed)
    _read_rewards(run, typed, read_module)
    return run


def _parse_number(name: str, setting: TrlSetting) -> TrlSetting:
    """A text that TRL's parser would read as a number, as one: YAML takes `5e-6` for a text."""
    field = FIELDS.get(name)
    is_number = field is not None and re.match("(int|float)", field.type)
    if not is_number or not isinstance(setting.value, str):
        return setting
    try:
        number = float(setting.value)
    except ValueError:
        return setting
    return TrlSetting(int(number) if number.is_integer() else number, setting.line)


def _read_model(run: TrlRun, values: Mapping[str, TrlSetting]) -> None:
    run.model = values.get("model_name_or_path")
    for name, argument in {"model_revision": "revision", "dtype": "dtype"}.items():
        if name in values:
            run.model_arguments[argument] = values[name]
    use_peft = values.get("use_peft")
    if use_peft is None or use_peft.value is not True:
        for name in _LORA:
            if name in values:
                run.note(values[name].line, name, values[name].value, "no effect without use_peft")
        return
    run.lora = {_LORA[name]: TrlSetting(value, 0) for name, value in LORA_DEFAULTS.items()}
    run.lora |= {_LORA[name]: values[name] for name in _LORA if name in values}


def _read_dataset(run: TrlRun, values: Mapping[str, TrlSetting]) -> None:
    mixture = values.get("datasets")
    use = run.dataset
    if mixture is not None and mixture.value:
        parts = mixture.value if isinstance(mixture.value, list) else []
        part = parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else None
        extra = set(part or {}) - {"path", "name", "split", "columns"}
        if part is None or extra or not isinstance(part.get("path"), str):
            use.is_made_by_script = True
            advice = (
                "a job has one dataset: write the mixture's rows to a file "
                '(`trl.get_dataset(…)["train"].to_json`) on the claim of dataset.files'
            )
            run.note(mixture.line, "datasets", mixture.value, advice)
            return
        use.name, use.config, use.split = part["path"], part.get("name"), part.get("split")
        return
    texts = {
        field: values[key].value
        for field, key in (
            ("name", "dataset_name"),
            ("config", "dataset_config"),
            ("split", "dataset_train_split"),
        )
        if key in values
    }
    use.name, use.config, use.split = (texts.get(key) for key in ("name", "config", "split"))
    if use.name is None:
        use.is_made_by_script = True
        run.note(0, "dataset_name", "", "not given: put the rows on the claim of dataset.files")


def _read_rewards(run: TrlRun, values: Mapping[str, TrlSetting], read_module: ReadModule) -> None:
    model = values.get("reward_model_name_or_path")
    if model is not None and isinstance(model.value, str):
        run.rewards.append(RewardUse(model.line, model.value))
    functions = values.get("reward_funcs")
    if functions is None:
        return
    names: Any = functions.value if isinstance(functions.value, list) else [functions.value]
    for name in names:
        if name == OVERLONG:
            run.reward_files["rewards.py"] = _OVERLONG_FILE
            attribute = "soft_overlong_punishment_reward"
            reward = RewardUse(functions.line, attribute, f"rewards:{attribute}", True)
            run.rewards.append(reward)
        elif name in BUILT_IN:
            run.rewards.append(RewardUse(functions.line, name, f"trl.rewards:{name}"))
        elif isinstance(name, str) and "." in name:
            run.rewards.append(_imported_reward(run, functions.line, name, read_module))
        else:
            run.note(functions.line, "reward_funcs", name, "no reward function of `trl grpo`")


def _imported_reward(run: TrlRun, line: int, path: str, read_module: ReadModule) -> RewardUse:
    module, _, name = path.rpartition(".")
    text = read_module(module) if "." not in module else None
    if text is None:
        run.note(line, "reward_funcs", path, f"the training image must have the module {module!r}")
        return RewardUse(line, metric_name(name), f"{module}:{name}")
    run.reward_files[f"{module}.py"] = text
    return RewardUse(line, metric_name(name), f"{module}:{name}", is_in_config_map=True)
