"""What a job says about GRPOConfig reaches the live class, and its schedules run."""

import dataclasses
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, TrainingArguments, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from trl import GRPOConfig, GRPOTrainer

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.keyword_arguments import (
    NEEDED_ARGUMENTS,
    SCHEDULE_ARGUMENTS,
    Overrides,
    ScheduleArguments,
)
from grpo_api.spec.training import TrainingSpec
from grpo_api.spec.trl_places import FIELDS, SAME_NAME
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.training.build_run import (
    make_config,
    require_decay,
    require_router,
    set_scheduled_rate,
)
from grpo_trainer.training.trl_config import ALL_STEPS, config_arguments
from tests.generated import cases
from tests.support.ranks import runs

PLAN = runs.plan(Path("/models/demo"))
NEEDS_A_GPU = {"tf32": True}
"""Overrides that GRPOConfig refuses on a CPU."""


def planned(**training: Any) -> TrainingPlan:
    """The demo's plan with other fields of spec.training."""
    changed = PLAN.model_dump(by_alias=True)
    changed["training"] |= training
    return TrainingPlan.model_validate(changed)


def configuration(plan: TrainingPlan) -> GRPOConfig:
    """The plan's GRPOConfig, as the worker makes it."""
    return make_config(config_arguments(plan), plan.training.overrides)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field as JSON has it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def test_the_generated_list_is_the_live_class() -> None:
    live = dataclasses.fields(GRPOConfig)
    assert list(FIELDS) == [field.name for field in live]
    assert {name: field.default for name, field in FIELDS.items()} == {
        field.name: default_of(field) for field in live
    }
    declared = GRPOConfig.__annotations__
    assert {name for name, field in FIELDS.items() if field.is_own} == set(declared)


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a field's JSON schema takes."""
    if "anyOf" in schema:
        return st.one_of(*map(values_of, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    match schema["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high)
    return st.floats(
        low,
        high,
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
    )


def fields_that_reach_trl() -> Iterator[tuple[str, str]]:
    """Names of GRPOConfig that the spec or an override says under the same name, each with the
    name in the spec."""
    for name in SAME_NAME:
        if name not in BATCH:
            yield name, TrainingSpec.model_fields[name].alias or name
    for name in Overrides.model_fields:
        yield name, f"overrides.{name}"


BATCH = ("num_generations",)
"""Set by the plan's split of a batch, too, so that not each value goes with it."""
TRAINING_SCHEMA = TrainingSpec.model_json_schema()["properties"]
OVERRIDES_SCHEMA = Overrides.model_json_schema()["properties"]


@given(data=st.data())
@settings(max_examples=15)
def test_a_value_of_each_field_is_in_trls_live_configuration(data: st.DataObject) -> None:
    """All other fields are refused, with what to use (tests/unit/test_keyword_arguments.py)."""
    drawn: dict[str, Any] = {"overrides": {}}
    expected = {}
    for name, path in fields_that_reach_trl():
        head, _, tail = path.partition(".")
        schema = OVERRIDES_SCHEMA[tail] if tail else TRAINING_SCHEMA[head]
        value = data.draw(values_of(schema), label=path)
        if NEEDS_A_GPU.get(name) == value:
            continue
        if tail:
            drawn["overrides"][tail] = value
            expected[name] = FIELDS[name].default if value is None else value
        else:
            drawn[head] = value
            expected[name] = value
    training = TrainingSpec.model_construct(**_by_name(drawn))
    config = configuration(PLAN.model_copy(update={"training": training}))
    for name, value in expected.items():
        assert getattr(config, name) == value, name


def _by_name(drawn: dict[str, Any]) -> dict[str, Any]:
    """spec.training by Python's names: rules over several fields are another test's."""
    names = {field.alias or name: name for name, field in TrainingSpec.model_fields.items()}
    values = {names[alias]: value for alias, value in drawn.items()}
    return dict(PLAN.training) | values | {"overrides": Overrides(**drawn["overrides"])}


def test_every_field_of_the_spec_has_trls_default_or_says_why_not() -> None:
    training = TrainingSpec()
    differing = {
        name: getattr(training, name)
        for name in SAME_NAME
        if getattr(training, name) != FIELDS[name].default
    }
    assert differing == {"num_train_epochs": 1.0}


def test_the_spec_names_each_loss_of_trl() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for loss in TRAINING_SCHEMA["lossType"]["enum"]:
        assert f'"{loss}"' in source
    assert set(TRAINING_SCHEMA["lossType"]["enum"]) == {
        word
        for line in source.splitlines()
        if "self.loss_type" in line
        for word in line.split('"')[1::2]
    } - {"Unknown loss type: {self.loss_type}"}


def test_grpo_config_judges_what_only_it_can_and_the_field_is_named() -> None:
    with pytest.raises(BadInput, match=r"spec\.training\.overrides\.tf32: GRPOConfig refuses"):
        configuration(planned(overrides={"tf32": True, "log_level": "info"}))


def test_a_weight_for_routers_needs_a_mixture_of_experts() -> None:
    class Config:
        def get_text_config(self) -> "Config":
            return self

    class Model:
        config = Config()

    require_router(Overrides(router_aux_loss_coef=0), Model())
    with pytest.raises(BadInput, match=r"spec\.training\.overrides\.router_aux_loss_coef is 0\.1"):
        require_router(Overrides(router_aux_loss_coef=0.1), Model())
    Config.output_router_logits = False  # type: ignore[attr-defined]
    require_router(Overrides(router_aux_loss_coef=0.1), Model())


def test_the_schedules_are_those_of_transformers_that_follow_no_metric() -> None:
    kinds = {kind.value for kind in SchedulerType}
    assert kinds - {"greedy", "reduce_lr_on_plateau"} == set(SCHEDULE_ARGUMENTS)


@pytest.mark.parametrize("kind", SCHEDULE_ARGUMENTS)
def test_a_schedule_takes_the_arguments_that_transformers_takes(kind: str) -> None:
    names = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters)
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    assert names - ours == set(SCHEDULE_ARGUMENTS[kind])  # type: ignore[index]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A schedule with arguments that the spec accepts."""
    kind = draw(st.sampled_from(sorted(SCHEDULE_ARGUMENTS)))
    properties = ScheduleArguments.model_json_schema()["properties"]
    arguments = {
        name: value
        for name in SCHEDULE_ARGUMENTS[kind]
        if (value := draw(values_of(properties[name]))) is not None
    }
    needed = NEEDED_ARGUMENTS.get(kind, ())
    if "min_lr" in needed:
        arguments.pop("min_lr", None)
        arguments["min_lr_rate"] = arguments.get("min_lr_rate", 0.1)
    elif needed:
        arguments["num_decay_steps"] = arguments.get("num_decay_steps", 3)
    if kind == "polynomial":
        arguments["lr_end"] = min(arguments.get("lr_end", 0.0), 1e-4)
    return kind, arguments


@settings(max_examples=cases(200, gate=25))
@given(schedule=schedules(), warmup=st.integers(0, 20), steps=st.integers(1, 20))
def test_a_schedule_with_its_arguments_runs_and_can_be_set_to_any_step(
    schedule: tuple[str, dict[str, Any]], warmup: int, steps: int
) -> None:
    kind, arguments = schedule
    warmup = min(warmup, steps)
    share = TrainingArguments("unused", use_cpu=True, report_to="none", lr_scheduler_type=kind)
    share.warmup_steps = warmup / steps if warmup < steps else ALL_STEPS
    try:
        require_decay(share, steps)
    except BadInput:
        assert (kind, warmup) == ("polynomial", steps)
        return
    TrainingSpec(
        learning_rate=1e-3,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=ScheduleArguments(**arguments),
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(kind, optimizer, warmup, steps, arguments or None)
    assert isinstance(scheduler, LambdaLR)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rate = scheduler.get_last_lr()[0]
        assert math.isfinite(rate)
        assert rate >= 0
        optimizer.param_groups[0]["lr"] = 7.0
        set_scheduled_rate(scheduler)
        assert optimizer.param_groups[0]["lr"] == rate
