"""Fields of the spec whose names are those of Python arguments: in `spec.training` `overrides` of
TRL's GRPOConfig and `lrSchedulerKwargs` of transformers' schedules, and `spec.generation.kwargs`.

The first two are typed as the rest of the spec is, so that the API server checks names and values.
A test holds the overrides to trl_fields.json, another calls each schedule with its arguments.

Names and meanings of generation.kwargs are those of transformers' GenerationConfig (5.23) and of
vLLM's SamplingParams (0.30), to which TRL passes its generation_kwargs. Which there are depends on
the engine, so they are checked in Python. Three kinds are left out. The plan must know some (beams
and candidates take memory), one makes a run depend on the clock (max_time), and others only format
the answer.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_snake

from ..text.base import Model, Rule
from ..text.messages import value_text
from ..text.problems import requirement

MAX_KEYS = 32
MAX_BYTES = 8192
"""Of the whole map as compact JSON: a plan has all of them and goes into an annotation."""
MAX_DEPTH = 8
MOST_DIGITS = 1e21
"""Go writes larger numbers with an exponent, which no integer has."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class HashableMap(dict[str, Any]):
    """A map in a frozen record, whose hash the planner's caches need."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(json.dumps(self, sort_keys=True))


def _validate_map(values: dict[str, Any]) -> HashableMap:
    """Reject keys that no Python argument has, and what is too deep or too large."""
    for name in values:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is no name of an argument: letters, digits and _")
    if _is_deeper(values, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes of JSON, at most {MAX_BYTES} are allowed")
    # A key of YAML that is a number is text in JSON.
    return HashableMap(_as_served(json.loads(text)))


def _as_served(value: Any) -> Any:
    """The value as the API server returns it: 2.0 is the integer 2."""
    if isinstance(value, dict):
        return {name: _as_served(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_served(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < MOST_DIGITS:
        return int(value)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects are nested deeper than `levels`."""
    if not isinstance(value, list | dict):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in children)


JSONMap = Annotated[
    dict[str, Any],
    Field(max_length=MAX_KEYS, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
    AfterValidator(_validate_map),
]
"""Arguments of a library by their names there: bounded here, judged by the library.

A CustomResourceDefinition has no type for any JSON value. So the API server keeps what it is given
(x-kubernetes-preserve-unknown-fields), and Python checks keys, size and depth.
"""


LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
Rate = Annotated[float, Field(ge=0, le=1)]
_MOST_LETTERS = 64
"""Longer names of fields are nobody's slip: no other name is looked for, and they are cut."""


class KeywordArguments(Model):
    """Arguments under the names that they have in Python."""

    model_config = ConfigDict(alias_generator=None)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are set."""
        return self.model_dump(exclude_none=True)


class Overrides(KeywordArguments):
    """Fields of TRL's GRPOConfig that the spec lacks, and that leave memory and time as planned."""

    tf32: bool | None = None
    """As TRL has it. Unset: torch's."""
    torch_empty_cache_steps: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """As TRL has it. Unset: never."""
    log_level: LogLevel | None = None
    """Of transformers. Unset: passive."""
    log_level_replica: LogLevel | None = None
    """Of other ranks. Unset: warning."""
    log_on_each_node: bool | None = None
    """As TRL has it. Unset: true."""
    ddp_bucket_cap_mb: Annotated[int, Field(ge=1, le=65536)] | None = None
    """MiB of gradients under DDP. Unset: torch's."""
    ddp_broadcast_buffers: bool | None = None
    """As torch has it. Unset: torch's."""
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Weight of the experts' balance. Unset: the model's."""


def override_refusal(name: str, value: object) -> str:
    """Why `training.overrides` has no field of that name, and what to write instead."""
    path = f"spec.training.overrides.{name[:_MOST_LETTERS]}"
    value_note = f"(got {value_text(value, 40)})"
    # Right specs need no table of TRL's fields.
    from .trl_places import PLACES, place_of

    # Scripts have names of an earlier TRL, and files of `trl grpo` have all settings together.
    place = place_of(name)
    if place is None:
        close: list[str] = []
        if len(name) <= _MOST_LETTERS:
            close = get_close_matches(to_snake(name), PLACES, n=1, cutoff=0.8)
        suggestion = f"; did you mean {close[0]}?" if close else ""
        return f"{path}: GRPOConfig of the pinned TRL has no such field{suggestion} {value_note}"
    if place.kind == "Spec":
        return f"{path}: is no override; set spec.{place.path} instead {value_note}"
    instead = f"; see spec.{place.path}" if place.path else ""
    return f"{path}: can't be set: {place.reason}{instead} {value_note}"


class ScheduleArguments(KeywordArguments):
    """Arguments of transformers' learning-rate schedules."""

    RULES = (
        Rule("!has(self.min_lr) || !has(self.min_lr_rate)", "set min_lr or min_lr_rate, not both"),
    )

    num_cycles: Annotated[float, Field(gt=0, le=10000)] | None = None
    """Waves. Unset: 0.5, with restarts 1."""
    lr_end: Rate | None = None
    """Last rate. Unset: 1e-7."""
    power: Annotated[float, Field(gt=0, le=100)] | None = None
    """Exponent. Unset: 1."""
    timescale: Annotated[int, Field(ge=1, le=100000000)] | None = None
    """Steps. Unset: the warm-up, or 10,000."""
    min_lr: Rate | None = None
    """Least rate. Unset: by min_lr_rate."""
    min_lr_rate: Rate | None = None
    """Its share of the peak. Unset: by min_lr."""
    warmup_lr_rate: Rate | None = None
    """First rate's share of the peak. Unset: a step's."""
    num_decay_steps: Annotated[int, Field(ge=1, le=100000000)] | None = None
    """Steps of the decay. Unset: none."""
    num_stable_steps: Annotated[int, Field(ge=0, le=100000000)] | None = None
    """Steps at the peak. Unset: all others."""
    warmup_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    """Shape of the warm-up. Unset: linear."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    """Shape of the decay. Unset: cosine."""
    min_lr_ratio: Rate | None = None
    """Least rate's share of the peak. Unset: 0."""


ScheduleType = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
"""The schedules of transformers that are a LambdaLR, which a resumed run can set to any step; the
others, reduce_lr_on_plateau and greedy, follow a metric of an evaluation."""

_COSINE = ("num_cycles",)
_LEAST = ("num_cycles", "min_lr", "min_lr_rate")
SCHEDULE_ARGUMENTS: Mapping[ScheduleType, tuple[str, ...]] = {
    "linear": (),
    "cosine": _COSINE,
    "cosine_with_restarts": _COSINE,
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": _LEAST,
    "cosine_warmup_with_min_lr": (*_LEAST, "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_cycles",
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
    ),
}
"""The arguments that each schedule takes."""

NEEDED_ARGUMENTS: Mapping[ScheduleType, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Of which one must be set."""

POLYNOMIAL_END = 1e-7
"""transformers' lr_end."""


def _of_arguments(conditions: Iterable[str]) -> str:
    """CEL of a TrainingSpec: all conditions hold of its lrSchedulerKwargs, `k`."""
    return f"[self.lrSchedulerKwargs].all(k, {' && '.join(conditions)})"


def _argument_schedule_rules() -> Iterator[str]:
    """CEL: arguments are unset, or the schedule is one of those that take them."""
    names_by_kinds: dict[tuple[str, ...], list[str]] = {}
    for name in ScheduleArguments.model_fields:
        kinds = tuple(
            str(kind) for kind, arguments in SCHEDULE_ARGUMENTS.items() if name in arguments
        )
        names_by_kinds.setdefault(kinds, []).append(name)
    for kinds, names in names_by_kinds.items():
        presence_test = " || ".join(f"has(k.{name})" for name in names)
        yield f"(!({presence_test}) || self.lrSchedulerType in {list(kinds)})"


def _needed_argument_rules() -> Iterator[str]:
    """CEL: the schedule is one that needs nothing, or what it needs is there."""
    for kind, needed in NEEDED_ARGUMENTS.items():
        presence_test = " || ".join(f"has(k.{name})" for name in needed)
        yield f"(self.lrSchedulerType != '{kind}' || {presence_test})"


ARGUMENTS_BELONG = _of_arguments(_argument_schedule_rules())
"""The schedule takes all of its arguments."""
ARGUMENTS_SUFFICE = _of_arguments(_needed_argument_rules())
"""The schedule has what it needs."""


Count = Annotated[int, Field(ge=0, le=1048576)]
Token = Annotated[int, Field(ge=0, le=16777216)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=4096)]
Share = Annotated[float, Field(gt=0, le=1)]
Cutoff = Annotated[float, Field(ge=0, lt=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Word = Annotated[str, Field(min_length=1, max_length=128)]

TRANSFORMERS: dict[str, Any] = {
    "begin_suppress_tokens": Tokens,
    "bad_words_ids": Annotated[list[Tokens], Field(min_length=1)],
    "epsilon_cutoff": Cutoff,
    "eta_cutoff": Cutoff,
    "exponential_decay_length_penalty": tuple[Count, float],
    "min_new_tokens": Count,
    "no_repeat_ngram_size": Count,
    "renormalize_logits": bool,
    "sequence_bias": Annotated[list[tuple[Tokens, float]], Field(min_length=1)],
    "suppress_tokens": Tokens,
    "top_h": Share,
    "typical_p": Share,
}
"""Arguments of GenerationConfig."""

VLLM: dict[str, Any] = {
    "allowed_token_ids": Tokens,
    "bad_words": Annotated[list[Word], Field(min_length=1)],
    "frequency_penalty": Penalty,
    "min_tokens": Count,
    "presence_penalty": Penalty,
}
"""Arguments of SamplingParams."""

PENALTIES = ("frequency_penalty", "presence_penalty")
"""Of SamplingParams what vLLM subtracts from logits; the trainer divides it by the temperature,
which its engines have in their logits."""
MOST_PENALTY = 2.0
"""The largest that vLLM takes (sampling_params.py, _verify_args)."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples at no lower one but 0 (sampling_params.py, _MAX_TEMP): it takes this instead."""

FIELDS = {
    "temperature": "training.temperature",
    "top_p": "training.topP",
    "top_k": "training.topK",
    "min_p": "training.minP",
    "repetition_penalty": "training.repetitionPenalty",
    "max_new_tokens": "training.maxCompletionLength",
    "max_length": "training.maxCompletionLength",
    "max_tokens": "training.maxCompletionLength",
    "num_return_sequences": "training.numGenerations",
    "n": "training.numGenerations",
    "seed": "training.seed",
    "stop": "generation.stop",
    "stop_strings": "generation.stop",
    "stop_token_ids": "generation.stop",
    "eos_token_id": "generation.stop",
}
"""Arguments that a field of the spec sets."""


def problems_of_kwargs(
    kwargs: Mapping[str, Any], engine: Literal["Transformers", "Colocated", "Servers"]
) -> Iterator[str]:
    """Yield what is wrong with each argument, with what to write instead."""
    argument_types = TRANSFORMERS if engine == "Transformers" else VLLM
    for name, value in kwargs.items():
        if name in FIELDS:
            yield f"kwargs.{name}: set {FIELDS[name]} instead"
        elif name not in argument_types:
            names = ", ".join(sorted(argument_types))
            yield f"kwargs.{name}: not for engine {engine}, which takes {names}"
        elif problem := _value_problem(engine, name, value):
            yield f"kwargs.{name}: {problem} (got {value_text(value, 40)})"


def vllm_refusal(kwargs: Mapping[str, Any], temperature: float, most_tokens: int) -> str:
    """Why vLLM would not take an argument at this temperature and completion length; empty if it
    takes them all."""
    least_tokens = kwargs.get("min_tokens", 0)
    if least_tokens > most_tokens:
        return (
            f"generation.kwargs.min_tokens {least_tokens}: training.maxCompletionLength is "
            f"{most_tokens}; lower the first, or raise the second"
        )
    most = MOST_PENALTY * min(1.0, temperature)
    for name in PENALTIES:
        penalty = kwargs.get(name, 0.0)
        if abs(penalty) > most:
            return (
                f"generation.kwargs.{name} {penalty:g}: vLLM applies at most {most:g} at "
                f"training.temperature {temperature:g}; lower the first, or raise the second"
            )
    return ""


def _value_problem(engine: str, name: str, value: Any) -> str:
    try:
        # As JSON, whose arrays are tuples too; strict, so that "4" and true are no numbers.
        _adapter(engine == "Transformers", name).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" for part in first["loc"])
        return f"{place} {requirement(first, {})}".strip()
    return ""


@cache
def _adapter(is_transformers: bool, name: str) -> TypeAdapter[Any]:
    return TypeAdapter((TRANSFORMERS if is_transformers else VLLM)[name])
