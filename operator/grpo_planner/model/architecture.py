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
from grpo_api.spec.model_config import quantised_message
from grpo_api.text.quantity import format_parameters, parameter_count

from ..result.result import PlanReason, SpecRejected
from . import catalogue, config
from .catalogue import UNKNOWN, Positions, lookup_positions, meant_name
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
    positions: Positions = UNKNOWN
    """The longest sequence that it was made for."""

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
    _refuse_quantised_original(model.name, "spec.model")
    if facts.config is not None:
        # Whatever else is said of the shape, these are the weights that would be loaded.
        config.refuse_untrainable(facts.config)
    if model.architecture is not None:
        return _model_of_architecture(model, model.architecture, "Spec", facts)
    if reported is not None and reported.model_type in families():
        return _loaded_model(model, reported)
    if facts.config is not None:
        return _from_file(model, facts.config, facts)
    by_name = by_name_and_size(model.name, model.parameters, "spec.model")
    # A private model may be called so; the preflight reads what is there.
    likely_name = meant_name(model.name)
    if not likely_name:
        return by_name
    slip = f"spec.model.name {model.name} is no name that is known: did you mean {likely_name}?"
    notes = [slip, by_name.note] if by_name.note else [slip]
    return replace(by_name, note="; ".join(notes))


def _loaded_model(model: ModelSpec, architecture: Architecture) -> ResolvedModel:
    """The shape of what an attempt loaded. These are the weights: a declared size that differs
    is reported as wrong."""
    shape = from_architecture(architecture)
    loaded = shape.counted_parameters
    declared = _declared_parameters(model)
    note = ""
    if declared and _is_other_size(loaded, declared):
        note = (
            f"spec.model.parameters says {model.parameters}, but the model was found to have "
            f"{format_parameters(loaded)} ({loaded:,}) parameters, and the plan counts on these"
        )
    kind = architecture.model_type or ""
    positions = _positions(model.name, architecture)
    return ResolvedModel(shape, "Exact", "FormerAttempt", note, kind, positions)


def _positions(name: str, architecture: Architecture) -> Positions:
    """The positions of an architecture; where it says none, those of the model's name."""
    count = architecture.max_position_embeddings
    return Positions(count, is_certain=True) if count else lookup_positions(name)


def _from_file(
    model: ModelSpec, config_json: Mapping[str, Any], facts: ModelFacts
) -> ResolvedModel:
    """The shape in config.json. A type that isn't known exactly may be a catalogued model, or of a
    declared size."""
    text = config_json.get("text_config")
    language_model: Mapping[str, Any] = text if isinstance(text, Mapping) else config_json
    is_nested = language_model is not config_json
    kind = str(language_model.get("model_type"))
    whole = max(facts.stored, _declared_parameters(model))
    has_formula = kind in families() and not is_nested
    if not has_formula and catalogue.lookup_shape(model.name):
        return by_name_and_size(model.name, model.parameters, "spec.model")
    if is_nested:
        return _nested_model(model, config.architecture_of(config_json), whole)
    if has_formula:
        architecture = config.architecture_of(config_json)
        return _model_of_architecture(model, architecture, "ConfigFile", facts)
    return _unknown_type(model, kind, config_json, whole)


def _nested_model(model: ModelSpec, text: Architecture, whole: int) -> ResolvedModel:
    """A language model inside another: the whole has a tower more than the shape, so its size must
    be known."""
    shape = from_architecture(text)
    counted = shape.counted_parameters
    least = counted * (1 - TOLERANCE)
    most = counted * (1 + TOWER)
    if not least <= whole <= most:
        reason = PlanReason.UNKNOWN_MODEL
        size = "nothing says how many there are"
        if whole:
            reason = PlanReason.INVALID_COMBINATION
            size = f"{format_parameters(whole)} are declared or stored"
        message = (
            f"config.json of {model.name} nests its language model of "
            f"{format_parameters(counted)} parameters in text_config, and of the whole {size}: set "
            "spec.model.parameters to the size on its model card"
        )
        raise SpecRejected(reason, message)
    note = (
        f"{model.name}: parts beside the language model are counted as weights, not as activations"
    )
    with_tower = replace(shape, declared=max(whole, counted))
    positions = _positions(model.name, text)
    return ResolvedModel(with_tower, "Estimated", "ConfigFile", note, positions=positions)


def _unknown_type(
    model: ModelSpec, kind: str, config_json: Mapping[str, Any], whole: int
) -> ResolvedModel:
    """A type without a formula: by its own widths where these give the known size, else as one of
    that size."""
    if not whole:
        known_types = ", ".join(families())
        message = (
            f"config.json says model_type {kind}, whose memory is known for {known_types} only: "
            "set spec.model.parameters to have it estimated from its size"
        )
        raise SpecRejected(PlanReason.UNKNOWN_MODEL, message)
    note = f"model_type {kind} has no formula of its own and is estimated as a Llama of this size"
    try:
        architecture = config.architecture_of(config_json)
    except SpecRejected:
        return by_name_and_size(model.name, format(whole), "spec.model")
    shape = from_architecture(architecture)
    if _is_other_size(shape.counted_parameters, whole):
        near, shape = catalogue.nearest_dense(whole)
        note += f", that of {near}"
    of_size = replace(shape, declared=whole)
    positions = _positions(model.name, architecture)
    return ResolvedModel(of_size, "Estimated", "ConfigFile", note, positions=positions)


def _model_of_architecture(
    model: ModelSpec, architecture: Architecture, found_in: ShapeSource, facts: ModelFacts
) -> ResolvedModel:
    """The shape of an architecture, once no known size contradicts it."""
    shape = from_architecture(architecture)
    counted = shape.counted_parameters
    declared = _declared_parameters(model)
    sizes = {"spec.model.parameters": declared, "the safetensors files": facts.stored}
    if any(size and _is_other_size(counted, size) for size in sizes.values()):
        raise _contradiction(model, shape, found_in, sizes)
    positions = _positions(model.name, architecture)
    if architecture.model_type in families():
        note = _advice(architecture) if found_in == "ConfigFile" else ""
        return ResolvedModel(
            shape, "Exact", found_in, note, architecture.model_type or "", positions
        )
    kind = architecture.model_type or "unset"
    known_types = ", ".join(families())
    note = (
        f"spec.model.architecture.modelType {kind} has no formula of its own and is estimated "
        f"as a Llama with these widths; exact are {known_types}"
    )
    of_size = replace(shape, declared=facts.stored or declared)
    return ResolvedModel(of_size, "Estimated", found_in, note, positions=positions)


def _contradiction(
    model: ModelSpec, shape: Shape, found_in: ShapeSource, sizes: Mapping[str, int]
) -> SpecRejected:
    """The refusal, with all numbers that are there."""
    names = {"Spec": "spec.model.architecture", "ConfigFile": "config.json"}
    source = names.get(found_in, found_in)
    numbers = {source: shape.counted_parameters}
    numbers |= {name: size for name, size in sizes.items() if size}
    statements = [
        f"{name} gives {format_parameters(count)} ({count:,})" for name, count in numbers.items()
    ]
    all_sizes = ", ".join(statements)
    message = (
        f"the sizes of {model.name} contradict each other by more than {TOLERANCE:.0%}: "
        f"{all_sizes} parameters. Correct the wrong one; spec.model.parameters may be left out"
    )
    return SpecRejected(PlanReason.INVALID_COMBINATION, message)


def _advice(architecture: Architecture) -> str:
    """How the operator, which reads no config.json, comes to the same plan."""
    fields = architecture.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude_none=True
    )
    entries = [f"{name}: {'true' if value is True else value}" for name, value in fields.items()]
    mapping = ", ".join(entries)
    return (
        "the operator doesn't read config.json; for this plan there, set "
        f"spec.model.architecture: {{{mapping}}}"
    )


def _declared_parameters(model: ModelSpec) -> int:
    return parameter_count(model.parameters) if model.parameters else 0


def _is_other_size(parameters: int, known_parameters: int) -> bool:
    """True if a number of parameters contradicts a known one: by more than people round."""
    deviation = abs(parameters / known_parameters - 1)
    return deviation > TOLERANCE


def by_name_and_size(name: str, parameters: str | None, path: str) -> ResolvedModel:
    """The catalogue's shape of a name, unless a size is declared that contradicts it; else the
    nearest to that size.

    Raises:
        SpecRejected: the catalogue has no such name and no size is declared, or the name says that
            its weights are quantised; `path` names the field to set.
    """
    _refuse_quantised_original(name, path)
    if word := catalogue.quantisation_in_name(name):
        message = quantised_message(f"{path}.name {name!r} says {word}", path)
        raise SpecRejected(PlanReason.UNSUPPORTED_MODEL, message)
    catalogued = catalogue.lookup_shape(name)
    count = parameter_count(parameters) if parameters else 0
    is_contradicted = catalogued and count and _is_other_size(catalogued.parameters, count)
    if catalogued and not is_contradicted:
        kind = catalogue.model_type(name)
        positions = lookup_positions(name)
        return ResolvedModel(
            catalogued, "Catalogue", "Catalogue", model_type=kind, positions=positions
        )
    if not count:
        exact = f"{path}.architecture to its widths, or " if path == "spec.model" else ""
        message = (
            f"{path}.name {name!r} is not in the built-in catalogue and its config.json is not at "
            f"hand: set {exact}{path}.parameters, such as 494M or 1.24B, from which the shape of a "
            f"dense model is guessed{_suggestion(name)}"
        )
        raise SpecRejected(PlanReason.UNKNOWN_MODEL, message)
    near, shape = catalogue.nearest_dense(count)
    note = f"{name}: shape estimated from {parameters} parameters as that of {near}"
    return ResolvedModel(shape, "Estimated", "Size", note)


def _refuse_quantised_original(name: str, path: str) -> None:
    """Refuse a model whose weights are quantised though its name doesn't say so, with its copy in
    bfloat16, where one is usual."""
    copy = catalogue.quantised_original(name)
    if copy is not None:
        usable = f"{copy}, its copy in bfloat16" if copy else "a copy in bfloat16"
        message = quantised_message(f"{path}.name {name!r}", path, usable)
        raise SpecRejected(PlanReason.UNSUPPORTED_MODEL, message)


def from_architecture(architecture: Architecture) -> Shape:
    """The shape of an architecture with the traits of its type."""
    type_traits = dict(traits(architecture.model_type))
    qkv_bias = type_traits.pop("qkv_bias", False) or architecture.attention_bias
    output_bias = type_traits.pop("output_bias", architecture.attention_bias)
    heads = architecture.attention_heads
    kv_heads = architecture.key_value_heads or heads
    head_dim = architecture.head_dim or max(1, architecture.hidden_size // heads)
    full_attention_layers = min(architecture.full_attention_layers, architecture.layers)
    return Shape(
        hidden=architecture.hidden_size,
        layers=architecture.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=architecture.intermediate_size,
        vocab=architecture.vocab_size,
        tied=architecture.tie_word_embeddings,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=architecture.mlp_bias,
        sliding_window=architecture.sliding_window or 0,
        full_attention_layers=full_attention_layers,
        experts=architecture.experts,
        active_experts=min(architecture.experts_per_token, architecture.experts),
        **type_traits,
    )


def _suggestion(name: str) -> str:
    """The end of a sentence on an unknown name: what it may be a slip of."""
    similar = meant_name(name) or " or ".join(catalogue.similar_names(name))
    return f"; or did you mean {similar}?" if similar else ""
