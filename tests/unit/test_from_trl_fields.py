"""Every field of GRPOConfig, in a generated script: the job's plan gives TRL that value, or the
field is named among what was not taken."""

import random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from grpo_api.job import parse_spec
from grpo_api.spec.trl_places import FIELDS, PLACES, TrlField
from grpo_cli.from_trl.config_fields import BATCHING, OPTIMIZERS
from grpo_cli.from_trl.job_spec import job_documents
from grpo_cli.from_trl.script_reader import read_script
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt, training_plan
from grpo_trainer.training.trl_config import OPTIMIZERS as PLANNED
from grpo_trainer.training.trl_config import config_arguments
from tests.generated import cases
from tests.unit.planning import H100, nodes, result
from tests.unit.trl_scripts import script

GROUP = 12
"""Fields that one script sets."""
CHOICES: dict[str, list[Any]] = {
    "lr_scheduler_type": ["linear", "cosine", "constant", "constant_with_warmup", "polynomial"],
    "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "nonsense"],
    "optim": ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "sgd"],
    "vllm_mode": ["colocate", "server"],
    "scale_rewards": [True, False, "group", "batch", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "vllm_importance_sampling_mode": [
        "token_mask", "token_truncate", "sequence_mask", "sequence_truncate",
    ],
    "lr_scheduler_kwargs": [{"num_cycles": 2.0}, {"end": 1}],
    "report_to": ["none", "wandb", ["wandb", "mlflow"]],
    "warmup_steps": [0, 0.25, 3],
    "model_init_kwargs": [None, "{}", {"device": 0}],
    "reward_weights": [[0.5], [1.0, 2.0]],
    "generation_kwargs": [{"no_repeat_ngram_size": 3}],
    "chat_template_kwargs": [{"enable_thinking": False}],
}  # fmt: skip
"""Values of fields whose type says too little."""
ELSEWHERE = {
    "bf16", "ds3_gather_for_generation", "hub_model_id", "hub_private_repo", "hub_token", "project",
    "push_to_hub", "report_to", "run_name", "sync_ref_model", "trackio_space_id", "use_cpu",
    "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_mode",
}  # fmt: skip
"""Fields that the job says in other words."""
AS_GIVEN = {
    "chat_template_kwargs", "generation_kwargs", "log_completions", "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "save_total_limit", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_max_model_length", "vllm_tensor_parallel_size",
}  # fmt: skip
"""Fields that the trainer passes to others than GRPOConfig: the job has their value."""


ENGINES = {"use_vllm": ("Transformers", "Colocated")}
"""Engines without and with a field."""
NOTHING = (None, False, "none")
"""Values that leave a job as it is."""


def values_of(field: TrlField) -> st.SearchStrategy[Any]:
    """Values that a script may give."""
    if field.name in CHOICES:
        return st.sampled_from(CHOICES[field.name])
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(1, 16) | st.just(-3),
        "float": st.floats(0.01, 1.0).map(lambda number: round(number, 3)) | st.just(1e12),
        "bool": st.booleans() | st.sampled_from([0, 1, "true"]),
        "dict": st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3), max_size=2),
        "list": st.lists(st.sampled_from(["a", "b"]), max_size=2),
        "None": st.none(),
    }
    matching = [kinds[kind] for kind in kinds if kind in field.type]
    return st.one_of(matching) if matching else st.text("abc/é'\\", max_size=6)


def arguments_of(text: str) -> tuple[dict[str, Any] | None, dict[str, Any], set[str]]:
    """What the trainer gives GRPOConfig (None if nothing fits), the spec, and the names of what
    was not taken."""
    run = read_script(text, "train.py", lambda _: None)
    spec = parse_spec(job_documents(run, "job", 1, None, None)[-1]["spec"], creating=True)
    noted = {note.name.partition("[")[0] for note in run.notes}
    plan = result(spec, nodes(1, 8, H100)).chosen
    shown = spec.model_dump(by_alias=True, exclude_unset=True)
    if plan is None:
        return None, shown, noted
    attempt = Attempt(key=ObjectKey("a", "job"), uid="0", spec=spec, plan=plan, number=1)
    return config_arguments(training_plan(attempt)), shown, noted


def is_taken(name: str, value: Any, arguments: dict[str, Any], spec: dict[str, Any]) -> bool:
    """Whether TRL gets the value, in whatever words."""
    is_default = value in (FIELDS[name].default, {})
    if is_default and (name not in arguments or PLACES[name].kind == "Refused"):
        return True  # as if it were not given
    if name in arguments and (arguments[name] or None) == (value or None):
        return True
    if name == "optim":
        return bool(arguments[name] == PLANNED[OPTIMIZERS[value]])
    if name in ("gradient_checkpointing", "activation_checkpointing"):
        return bool(arguments["gradient_checkpointing"] == bool(value)) or value is None
    if name == "max_steps":
        return bool(arguments[name] == (value if value > 0 else -1))
    if name == "scale_rewards":
        return bool(arguments[name] == {True: "group", False: "none"}.get(value, value))
    if name == "reward_weights":
        return bool([reward.get("weight", 1) for reward in spec["rewards"]] == value)
    if name in ENGINES:
        return bool(spec.get("generation", {}).get("engine") == ENGINES[name][bool(value)])
    if name in ELSEWHERE or name in AS_GIVEN:
        place: Any = spec
        for part in PLACES[name].path.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place == value if name in AS_GIVEN else place is not None or value in NOTHING
    return False


def test_a_zero_is_a_setting_although_it_equals_false() -> None:
    _, _, noted = arguments_of(script("model_init_kwargs={'device': 0}"))
    assert "model_init_kwargs" in noted


def test_the_first_layer_alone_of_an_adapter_is_named() -> None:
    config = "peft_config=LoraConfig(layers_to_transform=0)"
    text = script().replace("reward_funcs=letters", f"reward_funcs=letters, {config}")
    _, _, noted = arguments_of("from peft import LoraConfig\n" + text)
    assert "layers_to_transform" in noted


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=cases(40, gate=3), phases=[Phase.generate])  # shrinking takes minutes
def test_every_field_reaches_trl_or_is_named(seed: int, data: st.DataObject) -> None:
    names = list(FIELDS)
    random.Random(seed).shuffle(names)
    lost = []
    for start in range(0, len(names), GROUP):
        chosen = {name: data.draw(values_of(FIELDS[name])) for name in names[start : start + GROUP]}
        text = script(", ".join(f"{name}={value!r}" for name, value in chosen.items()))
        arguments, spec, noted = arguments_of(text)
        if arguments is None:
            continue
        for name, value in chosen.items():
            if name in BATCHING or (name == "warmup_steps" and value >= 1):
                continue  # in other units: see the tests of steps
            if name not in noted and not is_taken(name, value, arguments, spec):
                lost.append((name, value, arguments.get(name)))
    assert lost == []


def test_completions_go_where_the_script_sends_them_and_to_no_log() -> None:
    _, spec, noted = arguments_of(script('log_completions=True, report_to=["wandb"]'))
    assert spec["tracking"]["samples"] is True
    assert "log_completions" not in noted
    _, spec, noted = arguments_of(script("log_completions=True, report_to='tensorboard'"))
    assert "samples" not in spec["tracking"]
    assert "log_completions" in noted


def test_a_script_without_settings_gets_trls_defaults() -> None:
    arguments, _, _ = arguments_of(script())
    assert arguments is not None
    differing = {
        name
        for name, value in arguments.items()
        if PLACES[name].kind != "Refused" and FIELDS[name].default != value
    }
    # What is computed stays; where and how it is computed is the plan's.
    assert differing <= {"bf16", "gradient_checkpointing", "save_steps", "use_vllm"}
