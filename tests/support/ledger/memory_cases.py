"""Cases on which the memory model is checked against accounts of the real code: what is predicted,
what is counted.

Apart from the test, because the benchmark memory_truth puts the same questions to whole models.
"""

from dataclasses import replace
from typing import Any

from grpo_planner.memory.phases import Prediction, predict
from grpo_planner.memory.setup import Precision, Setup
from grpo_planner.model import catalogue
from grpo_planner.model.shapes import Shape

from .accounting import Account
from .config_shapes import from_config
from .fake_models import Case


def shape(name: str, layers: int) -> Shape:
    """A catalogued shape with fewer layers."""
    return with_layers(catalogue.shapes()[name], layers)


def with_layers(whole: Shape, layers: int) -> Shape:
    """A shape with fewer layers, of which the same share attends to everything."""
    period = whole.layers // whole.full_attention_layers if whole.full_attention_layers else 0
    return replace(whole, layers=layers, full_attention_layers=layers // period if period else 0)


def case(
    name: str, family: str, precision: Precision = "bfloat16", layers: int = 2, **settings: Any
) -> Case:
    """A case by its model's name; 8 sequences are generated and 4 trained on at a time unless it
    says otherwise."""
    defaults: dict[str, Any] = {"micro_batch": 4, "generation_batch": 8}
    return Case(
        model=name,
        family=family,
        shape=shape(name, layers),
        precision=precision,
        **(defaults | settings),
    )


def of_defaults(
    family: str, precision: Precision = "bfloat16", layers: int = 2, **settings: Any
) -> Case:
    """A case of a family that the catalogue has no model of: the shape of its default config."""
    return Case(
        model=family,
        family=family,
        shape=with_layers(from_config({"model_type": family}), layers),
        precision=precision,
        **({"micro_batch": 4, "generation_batch": 8} | settings),
    )


PREFILLED: list[tuple[str, str, Precision]] = [
    ("phi-4-mini", "phi3", "bfloat16"),
    ("phi-4-mini", "phi3", "mixed"),
    ("phi-4-mini", "phi3", "float32"),
    ("llama-3.2-1b", "llama", "mixed"),
    ("qwen3-0.6b", "qwen3", "mixed"),
]
"""Models and precisions whose adapters are peaks where many prompts are read at once: at the gated
product, at the down projection, at attention."""
QUERY_AND_VALUE = ("q_proj", "v_proj")
"""What many adapters are on; the layers above and below have no gradient of their weights then."""
ON_QUERY_AND_VALUE: list[tuple[str, str, Precision, dict[str, Any]]] = [
    ("mixtral-8x7b", "mixtral", "bfloat16", {"checkpointing": False, "micro_batch": 16}),
    ("mixtral-8x7b", "mixtral", "bfloat16", {}),
    ("mixtral-8x7b", "mixtral", "mixed", {"checkpointing": False}),
    ("qwen3-30b-a3b", "qwen3_moe", "bfloat16", {"checkpointing": False, "micro_batch": 16}),
    ("gpt-oss-20b", "gpt_oss", "bfloat16", {"checkpointing": False}),
]
"""Experts that pass a gradient through and have none."""
CASES = [
    case("qwen2.5-0.5b", "qwen2"),
    case("qwen2.5-0.5b", "qwen2", "mixed"),
    case("qwen2.5-0.5b", "qwen2", "float32"),
    case("qwen2.5-0.5b", "qwen2", lora_rank=16),
    case("qwen2.5-0.5b", "qwen2", "mixed", eight_bit=True),
    case("qwen2.5-1.5b", "qwen2", "mixed", checkpointing=False, micro_batch=8),
    case("qwen2.5-1.5b", "qwen2", lora_rank=8, checkpointing=False, micro_batch=8),
    case("qwen2.5-7b", "qwen2", micro_batch=2, completion=1024),
    case("qwen2.5-7b", "qwen2", lora_rank=64, micro_batch=2, completion=1024),
    case("qwen3-0.6b", "qwen3", "mixed", checkpointing=False, micro_batch=8),
    case("qwen3-0.6b", "qwen3", checkpointing=False, micro_batch=16),
    case("qwen3-4b", "qwen3", "float32", checkpointing=False, micro_batch=8),
    case("qwen3-4b", "qwen3", "mixed", lora_rank=16, checkpointing=False, micro_batch=8),
    case("qwen3-4b", "qwen3", lora_rank=32, checkpointing=False, micro_batch=8),
    case("llama-3.2-1b", "llama"),
    case("llama-3.2-1b", "llama", "mixed", checkpointing=False, micro_batch=8),
    case("llama-3.2-1b", "llama", lora_rank=16, checkpointing=False, micro_batch=16),
    case("llama-3.1-8b", "llama", micro_batch=1, prompt=512, completion=2048),
    case("mistral-7b", "mistral", "mixed", micro_batch=2),
    case("mistral-7b", "mistral", lora_rank=16, micro_batch=8, completion=512),
    case("smollm2-360m", "llama", "mixed", micro_batch=16, generation_batch=32),
    case("smollm2-360m", "llama", "float32", lora_rank=16, checkpointing=False, micro_batch=8),
    case("phi-4-mini", "phi3"),
    case("phi-4-mini", "phi3", "mixed", checkpointing=False, micro_batch=8),
    case("phi-4-mini", "phi3", lora_rank=16, checkpointing=False, micro_batch=8),
    case("gemma-3-1b", "gemma3_text", layers=6),
    case("gemma-3-1b", "gemma3_text", "mixed", layers=6, checkpointing=False, micro_batch=8),
    case("gemma-3-1b", "gemma3_text", layers=6, lora_rank=16, checkpointing=False, micro_batch=8),
    case(
        "gemma-3-1b",
        "gemma3_text",
        layers=6,
        lora_rank=16,
        micro_batch=8,
        prompt=512,
        completion=512,
    ),
    case("smollm3-3b", "smollm3", checkpointing=False),
    case("olmo-2-0425-1b", "olmo2", checkpointing=False),
    of_defaults("olmo3", layers=4, checkpointing=False),
    of_defaults("olmo3", layers=4, lora_rank=16),
    of_defaults("granite", "mixed", checkpointing=False),
    of_defaults("granite", lora_rank=16),
    of_defaults("granite", lora_rank=16, checkpointing=False, micro_batch=8),
    of_defaults("granite", "float32", lora_rank=16, checkpointing=False),
    of_defaults("glm4", checkpointing=False),
    of_defaults("glm4", "mixed"),
    of_defaults("glm4", lora_rank=16, micro_batch=16),
    of_defaults("glm4", lora_rank=16, checkpointing=False, micro_batch=8),
    case(
        "qwen2.5-1.5b",
        "qwen2",
        lora_rank=16,
        lora_targets=QUERY_AND_VALUE,
        checkpointing=False,
    ),
    case("qwen2.5-1.5b", "qwen2", lora_rank=16, lora_targets=QUERY_AND_VALUE, micro_batch=16),
    case(
        "phi-4-mini",
        "phi3",
        "float32",
        lora_rank=16,
        micro_batch=16,
        generation_batch=2,
        completion=64,
    ),
    *[
        case(
            name,
            family,
            precision,
            micro_batch=2,
            generation_batch=32,
            prompt=512,
            completion=64,
            lora_rank=16,
        )
        for name, family, precision in PREFILLED
    ],
    case("smollm2-135m", "llama", micro_batch=1, generation_batch=256, prompt=512, completion=16),
    *[
        case(
            "qwen2.5-0.5b",
            "qwen2",
            micro_batch=1,
            generation_batch=rows,
            lora_rank=8,
            top_p=0.9,
            prompt=16,
            completion=16,
        )
        for rows in (64, 256)
    ],
]
"""Dense models with a fused attention kernel."""
UNFUSED = [
    case("gemma-2-2b", "gemma2", checkpointing=False),
    case("gemma-2-2b", "gemma2", prompt=1024),
    case("gemma-2-2b", "gemma2", "mixed", checkpointing=False),
    case("gemma-2-2b", "gemma2", lora_rank=16, checkpointing=False),
    case("qwen3-30b-a3b", "qwen3_moe"),
    case("qwen3-30b-a3b", "qwen3_moe", checkpointing=False),
    case("qwen3-30b-a3b", "qwen3_moe", lora_rank=8),
    case("qwen3-30b-a3b", "qwen3_moe", lora_rank=8, checkpointing=False),
    case("mixtral-8x7b", "mixtral", lora_rank=16, checkpointing=False),
    case("mixtral-8x7b", "mixtral", lora_rank=8, checkpointing=False, micro_batch=8),
    case("mixtral-8x7b", "mixtral", "mixed", lora_rank=8, checkpointing=False),
    case("qwen3-30b-a3b", "qwen3_moe", "mixed", lora_rank=8),
    case("mixtral-8x7b", "mixtral", checkpointing=False),
    *[
        case(name, family, precision, lora_rank=16, lora_targets=QUERY_AND_VALUE, **settings)
        for name, family, precision, settings in ON_QUERY_AND_VALUE
    ],
    case("gpt-oss-20b", "gpt_oss"),
    case("gpt-oss-20b", "gpt_oss", lora_rank=16, checkpointing=False),
]
"""Mixtures of experts, and models without a fused attention kernel."""
GATE = (
    case("qwen2.5-0.5b", "qwen2", "mixed", eight_bit=True),
    case("llama-3.2-1b", "llama", lora_rank=16, checkpointing=False, micro_batch=16),
    case("gemma-3-1b", "gemma3_text", "mixed", layers=6, checkpointing=False, micro_batch=8),
    case("qwen3-30b-a3b", "qwen3_moe"),
)
"""Those of `make test`: a full policy with 8-bit moments, an adapter, sliding windows, and
experts."""


def predicted(case: Case, accumulation: int) -> Prediction:
    """The closed form for the same configuration; a reference that needs no weights of its own."""
    setup = Setup(
        precision=case.precision, prompt=case.prompt, completion=case.completion,
        micro_batch=case.micro_batch,
        accumulation=accumulation, generation_batch=case.generation_batch, lora_rank=case.lora_rank,
        lora_targets=case.lora_targets, eight_bit=case.eight_bit, checkpointing=case.checkpointing,
        sorts_words=case.top_p < 1,
        reference="Adapter",
    )  # fmt: skip
    return predict(case.shape, setup)


def counted(truth: Account, accumulation: int) -> int:
    """The account's peak of one micro-batch, or of all."""
    return max(
        peak
        for name, peak in truth.phases.items()
        if accumulation > 1 or "accumulating" not in name
    )
