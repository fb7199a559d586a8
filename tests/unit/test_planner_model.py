"""Where a model's shape comes from: config.json, the spec, the catalogue, a declared size; and GPU
products."""

import contextlib
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.spec.model import Architecture, ModelSpec
from grpo_planner.model import catalogue
from grpo_planner.model.architecture import ModelFacts, resolve_model
from grpo_planner.model.catalogue import base_name, hub_ids, is_named_after, meant_name
from grpo_planner.model.shapes import families
from grpo_planner.result.result import PlanReason, SpecRejected
from tests.support.ledger.config_shapes import from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURE = {
    "layers": 16, "hiddenSize": 2048, "attentionHeads": 32, "keyValueHeads": 8, "headDim": 64,
    "intermediateSize": 8192, "vocabSize": 128256, "tieWordEmbeddings": True,
}  # fmt: skip

LISTS = st.lists(st.none() | st.just("full_attention") | st.integers(), max_size=3)
OBJECTS = st.dictionaries(
    st.sampled_from(["hidden_size", "model_type"]), st.integers() | st.text(max_size=3), max_size=2
)
JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**7),
    st.floats(),
    st.text(max_size=4),
    LISTS,
    OBJECTS,
)


def model(name: str, **fields: Any) -> ModelSpec:
    """spec.model."""
    return ModelSpec.model_validate({"name": name} | fields)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"), ("meta-llama/Meta-Llama-3.1-8B",
        "llama-3.1-8b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"), ("Qwen/Qwen2.5-Coder-7B",
        "qwen2.5-coder-7b"),
        ("google/gemma-3-1b-it", "gemma-3-1b"), ("/models/Qwen3-4B/", "qwen3-4b"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"), ("microsoft/phi-4", "phi-4"),
    ],
)  # fmt: skip
def test_names_are_found_in_the_catalogue(name: str, known: str) -> None:
    found = resolve_model(model(name))
    assert found.shape == catalogue.shapes()[known]
    assert found.source == "Catalogue"


@pytest.mark.parametrize("name", ["my/llama", "Qwen/Qwen2.5-0.75B", "qwen3-40b"])
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(SpecRejected, match=r" or spec\.model\.parameters") as rejected:
        resolve_model(model(name))
    assert rejected.value.reason == PlanReason.UNKNOWN_MODEL


def test_the_source_that_is_trusted_most_wins() -> None:
    def said(layers: int) -> Architecture:
        return Architecture.model_validate(ARCHITECTURE | {"modelType": "llama", "layers": layers})

    named = model("meta-llama/Llama-3.2-1B")
    given = model("meta-llama/Llama-3.2-1B", architecture=ARCHITECTURE | {"layers": 8})
    facts = ModelFacts(config=LLAMA | {"num_hidden_layers": 12})
    assert [(found.shape.layers, found.found_in) for found in (
        resolve_model(given, facts, said(10)), resolve_model(named, facts, said(10)),
        resolve_model(named, facts), resolve_model(named),
        resolve_model(model("mine", parameters="1.2B")),
    )] == [(8, "Spec"), (10, "FormerAttempt"), (12, "ConfigFile"), (16, "Catalogue"), (16,
    "Size")]  # fmt: skip


def test_every_source_gives_the_same_shape() -> None:
    """What `grpo plan --config` tells to set in spec.model.architecture is the file, to the last
    bit."""
    named = model("meta-llama/Llama-3.2-1B")
    from_file = resolve_model(named, ModelFacts(config=LLAMA))
    advised = yaml.safe_load(from_file.note.split("spec.model.architecture: ")[1])
    given = resolve_model(model("meta-llama/Llama-3.2-1B", architecture=advised))
    assert from_file.shape == given.shape == resolve_model(named).shape
    assert (from_file.source, given.source, given.note) == ("Exact", "Exact", "")


def test_a_contradicting_size_makes_it_another_model() -> None:
    pruned = resolve_model(model("meta-llama/Llama-3.2-1B", parameters="800M"))
    assert (pruned.source, pruned.shape.parameters, pruned.label) == (
        "Estimated",
        800_000_000,
        "800M",
    )
    assert "estimated from 800M" in pruned.note
    assert resolve_model(model("meta-llama/Llama-3.2-1B", parameters="1.2B")).source == "Catalogue"


@pytest.mark.parametrize("size", ["1K", "77K", "1M", "30M", "60M", "600M", "7B", "40B", "500B"])
def test_any_size_has_a_shape(size: str) -> None:
    shape = resolve_model(model("mine", parameters=size)).shape
    assert shape.counted_parameters / shape.parameters > 0.15 or size == "1K"
    assert shape.counted_parameters / shape.parameters < 3 or size == "1K"


def test_configs_of_other_families() -> None:
    qwen3 = from_config(LLAMA | {"model_type": "qwen3"})
    assert (qwen3.qk_norm, qwen3.qkv_bias) == (True, False)
    qwen2 = from_config(
        LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    )
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.sliding_window) == (True, False, 0)
    kinds = ["sliding_attention"] * 15 + ["full_attention"]
    gemma = from_config(
        LLAMA | {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": kinds}
    )
    assert (gemma.norms, gemma.wide_norms, gemma.sliding_window, gemma.full_attention_layers) == (
        4,
        True,
        512,
        1,
    )
    mixtral = from_config(
        LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    )
    assert (mixtral.experts, mixtral.active_experts) == (8, 2)
    biased = from_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert not from_config(LLAMA | {"model_type": "mistral", "attention_bias": True}).qkv_bias


@pytest.mark.parametrize(
    ("kind", "keys", "windowed"),
    [
        ("gemma2", {"sliding_window": 4096}, 8), ("gemma3_text", {"sliding_window": 512}, 14),
        ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 4}, 12), ("gpt_oss", {},
        8),
        ("mistral", {"sliding_window": 4096}, 16), ("mistral", {"sliding_window": None}, 0),
        ("phi3", {"sliding_window": 2047}, 16), ("llama", {"sliding_window": 4096}, 0),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 10}, 6),
        ("qwen3_moe", {"sliding_window": 4096, "use_sliding_window": True, "num_experts": 4}, 16),
    ],
)  # fmt: skip
def test_windows_where_layer_types_says_nothing(
    kind: str, keys: dict[str, Any], windowed: int
) -> None:
    """Gemma 2's file has no layer_types: with every layer windowed, 16k tokens were planned at 31.9
    instead of 49.2."""
    shape = from_config(LLAMA | {"model_type": kind} | keys)
    assert (shape.layers - shape.full_attention_layers if shape.sliding_window else 0) == windowed


def test_a_config_of_something_else_is_rejected() -> None:
    with pytest.raises(
        SpecRejected, match=r"model_type resnet, whose memory is known for llama, .* only: set spec"
    ):
        resolve_model(model("x"), ModelFacts(config={"model_type": "resnet"}))
    assert (
        resolve_model(
            model("x", parameters="1B"), ModelFacts(config={"model_type": "resnet"})
        ).source
        == "Estimated"
    )


@pytest.mark.parametrize(
    "about",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, {"model_type": "bert"},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    ],
)  # fmt: skip
def test_what_does_not_generate_is_refused(about: dict[str, Any]) -> None:
    with pytest.raises(SpecRejected, match="doesn't generate text from left to right") as rejected:
        resolve_model(
            model("meta-llama/Llama-3.2-1B", architecture=ARCHITECTURE),
            ModelFacts(config=LLAMA | about),
        )
    assert rejected.value.reason == PlanReason.UNSUPPORTED_MODEL


@pytest.mark.parametrize("kind", ["gemma4_text", "lfm2", "gpt_neox", "nemotron_h", None])
def test_types_without_a_formula_are_never_exact(kind: str | None) -> None:
    facts = ModelFacts(config=LLAMA | {"model_type": kind})
    with pytest.raises(SpecRejected, match=r"set spec\.model\.parameters to have it estimated"):
        resolve_model(model("my/model"), facts)
    near = resolve_model(model("my/model", parameters="1.3B"), facts)
    assert (near.source, near.shape.parameters, near.shape.layers) == (
        "Estimated",
        1_300_000_000,
        16,
    )
    far = resolve_model(model("my/model", parameters="8B"), facts)
    assert (far.source, far.shape.parameters) == ("Estimated", 8_000_000_000)
    assert "no formula of its own" in far.note
    given = resolve_model(
        model("my/model", architecture=ARCHITECTURE | ({"modelType": kind} if kind else {}))
    )
    assert (given.source, "no formula" in given.note) == ("Estimated", True)


def test_sizes_that_contradict_each_other_are_refused_with_the_three_numbers() -> None:
    named, facts = (
        model("my/llama", parameters="3B"),
        ModelFacts(config=LLAMA, stored=1_235_814_400),
    )
    with pytest.raises(SpecRejected) as rejected:
        resolve_model(named, facts)
    assert rejected.value.reason == PlanReason.INVALID_COMBINATION
    for number in (
        "config.json gives 1.24B",
        "spec.model.parameters gives 3B",
        "safetensors files gives 1.24B",
    ):
        assert number in str(rejected.value)
    with pytest.raises(SpecRejected, match="contradict"):
        resolve_model(model("my/llama"), replace(facts, stored=2 * facts.stored))
    with pytest.raises(SpecRejected, match=r"spec\.model\.architecture gives 1\.24B"):
        resolve_model(
            model("my/llama", parameters="8B", architecture=ARCHITECTURE | {"modelType": "llama"})
        )
    assert resolve_model(model("my/llama", parameters="1.2B"), facts).source == "Exact"


@pytest.mark.parametrize(
    "name",
    [
        "unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        "Qwen/Qwen3-8B-FP8",
        "bartowski/Llama-3.2-1B-Instruct-GGUF", "Qwen/Qwen2.5-7B-Instruct-AWQ",
        "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-Zero",
        "deepseek-ai/DeepSeek-V3-0324", "moonshotai/Kimi-K2-Instruct",
    ],
)  # fmt: skip
def test_quantised_names_are_refused(name: str) -> None:
    with pytest.raises(SpecRejected, match="its weights are quantised") as rejected:
        resolve_model(model(name, parameters="7.6B"))
    assert rejected.value.reason == PlanReason.UNSUPPORTED_MODEL
    assert resolve_model(model("unsloth/gpt-oss-20b-BF16")).source == "Catalogue"


@pytest.mark.parametrize(
    "name", ["DeepSeek-R1-0528-Qwen3-8B", "DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-Distill-X"]
)
def test_what_was_distilled_from_a_quantised_model_is_none(name: str) -> None:
    resolved = resolve_model(model(f"deepseek-ai/{name}", parameters="8.1B"))
    assert resolved.source == ("Estimated" if name.endswith("X") else "Catalogue")


def test_a_quantised_original_names_its_copy_in_bfloat16() -> None:
    narrow = ModelFacts(config=LLAMA | {"quantization_config": {"quant_method": "mxfp4"}})
    for facts in (ModelFacts(), narrow):
        with pytest.raises(SpecRejected, match="name to unsloth/gpt-oss-20b-BF16, its copy"):
            resolve_model(model("openai/gpt-oss-20b"), facts)


def test_a_quantised_base_is_refused_whatever_it_is_called() -> None:
    narrow = ModelFacts(config=LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(SpecRejected, match="quant_method gptq"):
        resolve_model(model("meta-llama/Llama-3.2-1B", architecture=ARCHITECTURE), narrow)


def test_a_sparse_config_breaks_no_catalogued_model() -> None:
    """Gemma 3's files leave out what transformers has as defaults, and nest the language model."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    sparse = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
    }
    known = resolve_model(model("google/gemma-3-4b-it"), ModelFacts(config=sparse))
    assert (known.source, known.shape) == ("Catalogue", catalogue.shapes()["gemma-3-4b"])
    alone = from_config(text)
    assert replace(alone, declared=known.shape.declared) == known.shape
    tuned = resolve_model(model("my/tuned", parameters="4.3B"), ModelFacts(config=sparse))
    assert (tuned.source, tuned.shape) == ("Estimated", known.shape)
    with pytest.raises(
        SpecRejected, match=r"nests its language model of 3\.88B .* set spec\.model\.parameters"
    ):
        resolve_model(model("my/tuned"), ModelFacts(config=sparse))


@given(st.dictionaries(st.sampled_from(sorted({*LLAMA, "layer_types", "text_config", "num_experts",
"architectures"})),
                       JSON_VALUES, max_size=4), st.sampled_from(sorted(families())))  # fmt: skip
def test_any_config_is_read_or_refused(strange: dict[str, Any], kind: str) -> None:
    with contextlib.suppress(SpecRejected):
        found = resolve_model(
            model("my/model"), ModelFacts(config=LLAMA | {"model_type": kind} | strange)
        )
        assert found.shape.parameters > 0


@given(
    st.fixed_dictionaries(
        {"max_position_embeddings": st.integers(1, 2**20) | JSON_VALUES},
        optional={
            key: st.fixed_dictionaries(
                {},
                optional={
                    "rope_type": st.sampled_from(["yarn", "llama3", "default"]) | JSON_VALUES,
                    "type": st.sampled_from(["yarn", "linear"]),
                    "factor": st.floats(0.5, 64) | JSON_VALUES,
                    "original_max_position_embeddings": st.integers(1, 2**20) | JSON_VALUES,
                },
            )
            for key in ("rope_scaling", "rope_parameters")
        },
    )
)
def test_positions_of_any_file_are_a_number_that_the_spec_takes(about: dict[str, Any]) -> None:
    with contextlib.suppress(SpecRejected):
        found = resolve_model(model("my/model"), ModelFacts(config=LLAMA | about)).positions
        stated = about["max_position_embeddings"]
        if isinstance(stated, int) and stated > 1:
            assert found.tokens >= stated
            assert found.is_certain


def test_yarn_stretches_the_positions_that_a_file_states() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for stated in (32768, 131072):
        about = {"max_position_embeddings": stated, "rope_scaling": yarn}
        found = resolve_model(model("my/model"), ModelFacts(config=LLAMA | about))
        assert found.positions == (131072, True)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("Qwen/Qwen2.5-7B-Instrct", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwn/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("meta-llama/Lama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen2.5-7BInstruct", "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_a_likely_slip_is_a_warning_since_a_private_model_may_be_called_so(
    slip: str, meant: str
) -> None:
    note = resolve_model(model(slip, parameters="7.6B")).note
    assert f"{slip} is no name that is known: did you mean {meant}?" in note


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-Math-RM-72B",
        "google/gemma-3-4b-pt", "google/gemma-3-27b-pt", "google/gemma-3n-E4B-it",
    ],
)  # fmt: skip
def test_another_word_is_another_model_and_no_slip(name: str) -> None:
    assert meant_name(name) == ""


@given(st.sampled_from(sorted(hub_ids().values())), st.text("abcxyz-_.", max_size=8))
def test_known_names_and_what_is_named_after_them_are_no_slips(known: str, ending: str) -> None:
    assert meant_name(known) == ""
    assert meant_name(known.lower()) == ""
    own = known.rpartition("/")[2]
    assert meant_name(f"a-company/{own}-{ending}") in ("", known) or not ending


LONG_NAMES = [
    model for name, model in sorted(hub_ids().items()) if len(name) > 12 and "/Meta-" not in model
]


@given(
    st.sampled_from(LONG_NAMES),
    st.data(),
)
def test_one_letter_less_in_a_long_name_is_a_slip(known: str, data: st.DataObject) -> None:
    organisation, name = known.split("/")
    # A letter between two numbers makes one of them when it is gone.
    letters = [found.start() for found in re.finditer(r"(?<=[A-Za-z])[A-Za-z](?=[A-Za-z])", name)]
    place = data.draw(st.sampled_from(letters))
    slip = f"{organisation}/{name[:place]}{name[place + 1 :]}"
    meant = meant_name(slip)
    assert (
        meant
        or slip.lower() in {other.lower() for other in hub_ids().values()}
        or any(is_named_after(base_name(slip), base) for base in hub_ids())
    )
