"""Reads the YAML file of `trl grpo --config`: the fields of GRPOConfig, ModelConfig and
GRPOScriptArguments, and a mixture of datasets, all at the top level."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_api.spec.trl_places import CLI_PLACES, FIELDS, RENAMED

from .config_fields import refusal_message
from .dataset_reader import ROWS_FILE, is_folder
from .reward_reader import RewardReader
from .trl_run import (
    ReadModule,
    RewardUse,
    TrlError,
    TrlRun,
    TrlSetting,
    metric_name,
)

SWITCH_TEXTS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(
    ("no", "false", "f", "n", "0"), False
)
"""What transformers reads as true and false."""
BUILT_IN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Reward functions that TRL's command has under these names."""
OVERLONG = "get_soft_overlong_punishment"
_OVERLONG_FILE = '''"""Reward functions of `trl grpo`."""

from trl.rewards import get_soft_overlong_punishment

soft_overlong_punishment_reward = get_soft_overlong_punishment(
    max_completion_len=1280, soft_punish_cache=256
)
'''
_TYPES = {"use_peft": "bool", "lora_r": "int", "lora_alpha": "int", "lora_dropout": "float"}
"""Types of ModelConfig's fields that a job has."""
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
        typed[name] = _parse_text(name, setting)
    for name, setting in typed.items():
        if name == "env":
            run.note(setting.line, name, "", "set spec.env; secrets go there by valueFrom")
        elif name in FIELDS or name not in CLI_PLACES:
            run.config[name] = setting
        elif CLI_PLACES[name].kind == "Refused" and setting.value:
            run.note(setting.line, name, setting.value, refusal_message(CLI_PLACES[name]))
    _read_model(run, typed)
    _read_dataset(run, typed)
    _read_rewards(run, typed, read_module)
    return run


def _parse_text(name: str, setting: TrlSetting) -> TrlSetting:
    """A text that TRL's parser would read as a number or a switch, as one: YAML takes `5e-6` for a
    text."""
    kind = FIELDS[name].type if name in FIELDS else _TYPES.get(name, "")
    if not isinstance(setting.value, str) or not re.match("int|float|bool", kind):
        return setting
    if kind.startswith("bool"):
        value = SWITCH_TEXTS.get(setting.value.lower(), setting.value)
        return TrlSetting(value, setting.line)
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


def _read_mixture(run: TrlRun, mixture: TrlSetting) -> None:
    parts = mixture.value if isinstance(mixture.value, list) else []
    part = parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else {}
    extra = set(part) - {"path", "name", "split", "columns"}
    path = part.get("path")
    if extra or not isinstance(path, str) or is_folder(path):
        run.dataset.is_made_by_script = True
        advice = (
            "a job has one dataset of the hub: write the mixture's rows to a file "
            '(`trl.get_dataset(…)["train"].to_json`) on the claim of dataset.files'
        )
        run.note(mixture.line, "datasets", mixture.value, advice)
        return
    use = run.dataset
    use.name, use.config, use.split = path, part.get("name"), part.get("split")


def _read_dataset(run: TrlRun, values: Mapping[str, TrlSetting]) -> None:
    mixture = values.get("datasets")
    if mixture is not None and mixture.value:
        _read_mixture(run, mixture)
        return
    use = run.dataset
    names = {"name": "dataset_name", "config": "dataset_config", "split": "dataset_train_split"}
    for field, key in names.items():
        if key in values:
            setattr(use, field, values[key].value)
    if use.name is None or is_folder(use.name):
        use.is_made_by_script = True
        why = "not given" if use.name is None else "no dataset of the hub"
        advice = f"{why}: put the rows on the claim of dataset.files, as {ROWS_FILE}"
        line = values["dataset_name"].line if use.name else 0
        run.note(line, "dataset_name", use.name or "", advice)


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
            module, _, function = name.rpartition(".")
            RewardReader(run, read_module).add_imported(functions.line, module, function)
        else:
            attribute = metric_name(str(name))
            advice = f"no reward function of `trl grpo`; write it as {attribute} of rewards.py"
            run.note(functions.line, "reward_funcs", name, advice)
            run.rewards.append(RewardUse(functions.line, attribute, f"rewards:{attribute}", True))
