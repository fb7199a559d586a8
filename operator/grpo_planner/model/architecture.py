"""Finds the shape of the job's model, from the source that is trusted most, and says which one that
was.

The order is spec.model.architecture, what a former attempt reported, config.json, the catalogue,
the declared size. It is the same for the operator and the CLI. Numbers of parameters that
contradict each other are refused, not averaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_api.plan.plan import ShapeSource
from grpo_api.spec.model import Architecture, ModelSpec
from grpo_api.text.quantity import format_parameters, parameter_count

from ..result.result import PlanReason, SpecRejected
from . import catalogue, config
from .shapes import Shape, families, traits

Source = Literal["Exact", "Catalogue", "Estimated"]
TOLERANCE = 0.1
"""A catalogued model whose size differs by more than this from the declared one is another model,
since people round; the widths of an architecture that differ by more contradict it."""
TOWER = 0.5
"""A file that nests its language model has other parts, such as a vision tower: at most this share
of it on top."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a caller knows of the policy beside the spec."""

    config: Mapping[str, Any] | None = None
    """Its config.json."""
    stored: int = 0
    """Parameters in its safetensors files, by their index or header; 0: not known."""


NOTHING = ModelFacts()


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A shape, how exact it is, where it came from, and what the user should know about that."""

    shape: Shape
    source: Source
    found_in: ShapeSource
    note: str = ""
    model_type: str = ""
    """As config.json names it, where the shape is of that type; empty where it is estimated."""

    @property
    def label(self) -> str:
        """The size for plan.parameters, such as `1.24B`."""
        return format_parameters(self.shape.parameters)


def resolve_model(
    model: ModelSpec, facts: ModelFacts = NOTHING, reported: Architecture | None = None
) -> ResolvedModel:
    """The shape of spec.model; `reported` is what a former attempt found it to be, which counts for
    known types.

    Raises:
        SpecRejected: the model is unknown and no size is declared, it can't be trained, or its
            sizes contradict.
    """
    if facts.config is not None:
        # Whatever else is said of the shape, these are the weights that would be loaded.
        config.refuse_untrainable(facts.config)
    if model.architecture is not None:
        return _given(model, model.architecture, "Spec", facts)
    if reported is not None and reported.model_type in families():
        return _reported(model, reported)
    if facts.config is not None:
        return _from_file(model, facts.config, facts)
    return by_name_and_size(model.name, model.parameters, "spec.model")


def _reported(model: ModelSpec, found: Architecture) -> ResolvedModel:
    """The shape of what an attempt loaded. These are the weights: a declared size that differs is
    told to be wrong."""
    shape = from_architecture(found)
    declared = _declared(model)
    note = ""
    if declared and abs(shape.counted_parameters / declared - 1) > TOLERANCE:
        loaded = shape.counted_parameters
        note = (
            f"spec.model.parameters says {model.parameters}, but a former attempt loaded "
            f"{format_parameters(loaded)} ({loaded:,}) parameters, and the plan counts on these"
        )
    return ResolvedModel(shape, "Exact", "FormerAttempt", note, found.model_type or "")


def _from_file(model: ModelSpec, read: Mapping[str, Any], facts: ModelFacts) -> ResolvedModel:
    """The shape in config.json. A type that isn't known exactly may be a catalogued model, or of a
    declared size."""
    text = read.get("text_config")
    kind = str((text if isinstance(text, Mapping) else read).get("model_type"))
    whole = max(facts.stored, _declared(model))
    known = catalogue.lookup_shape(model.name)
    if (kind not in families() or isinstance(text, Mapping)) and known:
        return by_name_and_size(model.name, model.parameters, "spec.model")
    if isinstance(text, Mapping):
        return _nested(model, from_config(read), whole)
    if kind in families():
        return _given(model, config.architecture_of(read), "ConfigFile", facts)
    return _unknown_type(model, kind, read, whole)


def _nested(model: ModelSpec, shape: Shape, whole: int) -> ResolvedModel:
    """A language model inside another: the whole has a tower more than the shape, so its size must
    be known."""
    if (
        not shape.counted_parameters * (1 - TOLERANCE)
        <= whole
        <= shape.counted_parameters * (1 + TOWER)
    ):
        size = (
            f"{format_parameters(whole)} are declared or stored"
            if whole
            else "nothing says how many there are"
        )
        reason = PlanReason.INVALID_COMBINATION if whole else PlanReason.UNKNOWN_MODEL
        raise SpecRejected(
            reason,
            f"config.json of {model.name} nests its language model of "
            f"{format_parameters(shape.counted_parameters)} "
            f"parameters in text_config, and of the whole {size}: set spec.model.parameters to "
            "the size on its model "
            "card",
        )
    note = (
        f"{model.name}: parts beside the language model are counted as weights, not as activations"
    )
    return ResolvedModel(
        replace(shape, declared=max(whole, shape.counted_parameters)),
        "Estimated",
        "ConfigFile",
        note,
    )


def _unknown_type(
    model: ModelSpec, kind: str, read: Mapping[str, Any], whole: int
) -> ResolvedModel:
    """A type without a formula: by its own widths where these give the known size, else as one of
    that size."""
    if not whole:
        raise SpecRejected(
            PlanReason.UNKNOWN_MODEL,
            f"config.json says model_type {kind}, whose memory is known for "
            f"{', '.join(families())} only: set "
            "spec.model.parameters to have it estimated from its size",
        )
    note = f"model_type {kind} has no formula of its own and is estimated as a Llama of this size"
    try:
        shape = from_config(read)
    except SpecRejected:
        return by_name_and_size(model.name, format(whole), "spec.model")
    if abs(shape.counted_parameters / whole - 1) > TOLERANCE:
        near, shape = catalogue.nearest_dense(whole)
        note += f", that of {near}"
    return ResolvedModel(replace(shape, declared=whole), "Estimated", "ConfigFile", note)


def _given(
    model: ModelSpec, given: Architecture, found_in: ShapeSource, facts: ModelFacts
) -> ResolvedModel:
    """The shape of an architecture, once no known size contradicts it."""
    shape = from_architecture(given)
    known = given.model_type in families()
    sizes = {"spec.model.parameters": _declared(model), "the safetensors files": facts.stored}
    if any(
        size and abs(shape.counted_parameters / size - 1) > TOLERANCE for size in sizes.values()
    ):
        raise _contradiction(model, shape, found_in, sizes)
    if known:
        note = _advice(given) if found_in == "ConfigFile" else ""
        return ResolvedModel(shape, "Exact", found_in, note, given.model_type or "")
    whole = facts.stored or _declared(model)
    note = (
        f"spec.model.architecture.modelType {given.model_type or 'unset'} has no formula of its "
        "own and is estimated "
        f"as a Llama with these widths; exact are {', '.join(families())}"
    )
    return ResolvedModel(replace(shape, declared=whole), "Estimated", found_in, note)


def _contradiction(
    model: ModelSpec, shape: Shape, found_in: ShapeSource, sizes: Mapping[str, int]
) -> SpecRejected:
    """The refusal, with all numbers that are there."""
    widths = {"Spec": "spec.model.architecture", "ConfigFile": "config.json"}
    numbers = {widths.get(found_in, found_in): shape.counted_parameters}
    numbers |= {name: size for name, size in sizes.items() if size}
    sizes_given = ", ".join(
        f"{name} gives {format_parameters(count)} ({count:,})" for name, count in numbers.items()
    )
    return SpecRejected(
        PlanReason.INVALID_COMBINATION,
        f"the sizes of {model.name} contradict each other by more than {TOLERANCE:.0%}: "
        f"{sizes_given} parameters. "
        "Correct the wrong one; spec.model.parameters may be left out",
    )


def _advice(given: Architecture) -> str:
    """How the operator, which reads no config.json, comes to the same plan."""
    fields = given.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    entries = ", ".join(f"{name}: {_yaml_scalar(value)}" for name, value in fields.items())
    return (
        "the operator doesn't read config.json; for this plan there, set "
        f"spec.model.architecture: {{{entries}}}"
    )


def _yaml_scalar(value: object) -> str:
    return "true" if value is True else str(value)


def _declared(model: ModelSpec) -> int:
    return parameter_count(model.parameters) if model.parameters else 0


def by_name_and_size(name: str, parameters: str | None, path: str) -> ResolvedModel:
    """The catalogue's shape of a name, unless a size is declared that contradicts it; else the
    nearest to that size.

    Raises:
        SpecRejected: the catalogue has no such name and no size is declared, or the name says that
            its weights are quantised; `path` names the field to set.
    """
    if word := catalogue.quantisation_in_name(name):
        raise config.quantised_rejection(f"{path}.name {name!r} says {word}", path)
    known = catalogue.lookup_shape(name)
    count = parameter_count(parameters) if parameters else 0
    if known and (not count or abs(known.parameters / count - 1) <= TOLERANCE):
        return ResolvedModel(known, "Catalogue", "Catalogue", model_type=catalogue.model_type(name))
    if not count:
        raise SpecRejected(
            PlanReason.UNKNOWN_MODEL,
            f"{path}.name {name!r} is not in the built-in catalogue and its config.json is not at "
            "hand: "
            f"set {path}.parameters, such as 494M or 1.24B{_meant(name)}",
        )
    near, shape = catalogue.nearest_dense(count)
    note = f"{name}: shape estimated from {parameters} parameters as that of {near}"
    return ResolvedModel(shape, "Estimated", "Size", note)


def from_architecture(given: Architecture) -> Shape:
    """The shape of an architecture with the traits of its type."""
    own = dict(traits(given.model_type))
    qkv_bias = own.pop("qkv_bias", False) or given.attention_bias
    kv_heads = given.key_value_heads or given.attention_heads
    head_dim = given.head_dim or max(1, given.hidden_size // given.attention_heads)
    return Shape(
        hidden=given.hidden_size,
        layers=given.layers,
        heads=given.attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=given.intermediate_size,
        vocab=given.vocab_size,
        tied=given.tie_word_embeddings,
        qkv_bias=qkv_bias,
        output_bias=given.attention_bias,
        mlp_bias=given.mlp_bias,
        sliding_window=given.sliding_window or 0,
        full_attention_layers=min(given.full_attention_layers, given.layers),
        experts=given.experts,
        active_experts=given.experts_per_token,
        **own,
    )


def from_config(read: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face config.json.

    Raises:
        SpecRejected: a width is missing or no number.
    """
    return from_architecture(config.architecture_of(read))


def _meant(name: str) -> str:
    """The end of a sentence on an unknown name: what it may be a slip of."""
    close = catalogue.similar_names(name)
    return f"; or did you mean {' or '.join(close)}?" if close else ""
