"""Runs one GRPO step's phases of the real code on fake tensors and reports each phase's peak in bytes.

Exists as the truth that the planner's closed form is held against, in tests/trainer/test_memory_truth.py and, with
more configurations, in benchmarks/memory_truth.py. Real: transformers' model classes, PEFT's layers, checkpointing,
autocast, TRL's chunked log-probabilities. Fake: the tensors, and the CUDA kernels (kernels.py).
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from grpo_planner.shapes import Shape

from .kernels import substituted
from .ledger import Ledger

Precision = Literal["bfloat16", "mixed", "float32"]

CHUNK = 32768
"""TRL's vocabulary tile (trl.trainer.utils)."""


@dataclass(frozen=True)
class Case:
    """One configuration to account for."""

    model: str
    family: str
    shape: Shape
    precision: Precision = "bfloat16"
    micro_batch: int = 2
    prompt: int = 256
    completion: int = 256
    checkpointing: bool = True
    lora_rank: int = 0
    eight_bit: bool = False
    generation_batch: int = 4

    @property
    def name(self) -> str:
        """A readable identity for test reports."""
        method = f"lora{self.lora_rank}" if self.lora_rank else "full8bit" if self.eight_bit else "full"
        saved = "ckpt" if self.checkpointing else "all"
        tokens = f"{self.micro_batch}x({self.prompt}+{self.completion})"
        return f"{self.model}-{self.precision}-{method}-{saved}-{tokens}-g{self.generation_batch}"


def configuration(family: str, shape: Shape) -> Any:
    """The transformers configuration of a catalogued shape."""
    classes = {"gemma3_text": "Gemma3TextConfig"}
    config_class = getattr(transformers, classes.get(family, f"{family.capitalize()}Config"))
    extra: dict[str, Any] = {"sliding_window": shape.sliding_window or None}
    if family == "gemma3_text":
        extra["layer_types"] = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(shape.layers)
        ]
    config = config_class(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied, max_position_embeddings=32768, pad_token_id=0, **extra,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    config.use_cache = False
    return config


class Run:
    """One case, phase by phase, on fake tensors."""

    def __init__(self, case: Case, ledger: Ledger) -> None:
        """Builds the model and its optimizer state, counted by the ledger."""
        self.case, self.ledger = case, ledger
        self.phases: dict[str, int] = {}
        self.ops: dict[str, str] = {}
        dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
        self.model = _build(case, dtype)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        ledger.add(*self.model.parameters(), *self.model.buffers())
        self.autocast = case.precision == "mixed" or bool(case.lora_rank and case.precision == "bfloat16")
        self.cast = lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast)

    @property
    def base(self) -> Any:
        """The transformers model inside PEFT's wrapper, or the model itself."""
        return self.model.get_base_model() if self.case.lora_rank else self.model

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the peak of what runs within; a phase that runs twice keeps its higher peak."""
        gc.collect()
        self.ledger.mark()
        yield
        if self.ledger.peak > self.phases.get(name, 0):
            self.phases[name], self.ops[name] = self.ledger.peak, self.ledger.peak_op
        gc.collect()

    def optimizer_state(self) -> list[Tensor]:
        """AdamW's two moments per trained parameter; in 8 bits with a float32 scale per 256 (Dettmers et al. 2021)."""
        states = []
        for parameter in self.trained:
            small = parameter.numel() < 4096
            for _ in range(2):
                if self.case.eight_bit and not small:
                    states += [torch.zeros(parameter.shape, dtype=torch.uint8), torch.zeros(parameter.numel() // 256)]
                else:
                    states.append(torch.zeros(parameter.shape) if self.case.eight_bit else torch.zeros_like(parameter))
        return states

    def generate(self) -> None:
        """Prefill and the last decoding step, with the cache grown to its last length, as transformers generates."""
        case, rows = self.case, self.case.generation_batch
        self.model.eval()
        ids, mask = _batch(rows, case.prompt)
        with self.phase("generate"), torch.no_grad():
            with self.cast():  # type: ignore[no-untyped-call]
                out = self.base(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            logits = out.logits[:, -1].to(copy=True, dtype=torch.float32)
            del out
            F.softmax(logits, dim=-1)
            del logits
        _grow(cache, case.completion - 2)
        with self.phase("generate"), torch.no_grad():
            mask = torch.ones(rows, case.prompt + case.completion - 1, dtype=torch.long)
            with self.cast():  # type: ignore[no-untyped-call]
                out = self.base(
                    input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
            logits = out.logits[:, -1].to(copy=True, dtype=torch.float32)
            F.softmax(logits, dim=-1)
            del out, logits, cache
        self.model.train()

    def reference(self) -> None:
        """The reference's log-probabilities: no gradients, no checkpointing, adapters disabled.

        The policy stands in for its frozen copy: what counts here is what the pass adds. Frozen weights matter, since
        autocast caches the casts of trained ones only.
        """
        self.checkpointing(False)
        for parameter in self.trained:
            parameter.requires_grad_(False)
        adapters_off = self.model.disable_adapter() if self.case.lora_rank else contextlib.nullcontext()
        with self.phase("reference"), torch.no_grad(), adapters_off:
            self.log_probs()
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.checkpointing(self.case.checkpointing)

    def checkpointing(self, on: bool) -> None:
        """Switches gradient checkpointing as TRL does."""
        if on:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()

    def log_probs(self) -> tuple[Tensor, Tensor]:
        """TRL's fused head on a CUDA device: only completion tokens are packed and scored, in tiles."""
        case = self.case
        ids, mask = _batch(case.micro_batch, case.prompt + case.completion)
        with self.cast():  # type: ignore[no-untyped-call]
            hidden = self.base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
            index = torch.zeros(case.micro_batch * case.completion, dtype=torch.long)
            packed = hidden.reshape(-1, hidden.shape[-1])[index] if hidden.is_contiguous() else _pack(hidden, index)
            head = self.base.get_output_embeddings()
            scored = ChunkedLogProbFunction.apply(
                packed, head.weight, None, ids[:, -case.completion :].reshape(-1), 1.0, CHUNK, None, 1.0,
                ("log_probs", "entropy"),
            )  # fmt: skip
        return scored[0], scored[1]

    def update(self) -> None:
        """One micro-batch, forward and backward, with GRPO's clipped ratio and k3 penalty."""
        with self.phase("forward"):
            log_probs, _ = self.log_probs()
            ratio = torch.exp(log_probs - log_probs.detach())
            reference = torch.zeros_like(log_probs)
            penalty = torch.exp(reference - log_probs) - (reference - log_probs) - 1
            loss = (-torch.min(ratio, torch.clamp(ratio, 0.8, 1.2)) + 0.04 * penalty).mean()
            del ratio, penalty, reference, log_probs
        with self.phase("backward"), self.ledger.backward():
            loss.backward()  # type: ignore[no-untyped-call]
            del loss


def _pack(hidden: Tensor, index: Tensor) -> Tensor:
    """`hidden[mask]` of [batch, tokens, width]: one gathered copy, whatever the layout."""
    row = torch.zeros_like(index)
    return hidden[row, index]


def _batch(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of [rows, tokens]."""
    return torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens, dtype=torch.long)


def _grow(cache: Any, tokens: int) -> None:
    """Lengthens each layer's cache as decoding would have done, up to its window."""
    for layer in cache.layers:
        room = tokens
        if getattr(layer, "sliding_window", None):
            room = min(tokens, layer.sliding_window - 1 - layer.keys.shape[-2])
        if room > 0:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                setattr(layer, name, torch.cat([old, old.new_empty(*old.shape[:2], room, old.shape[3])], -2))


def _build(case: Case, dtype: torch.dtype) -> Any:
    """The model with fake weights, with float32 adapters when asked for (PEFT's own default)."""
    config = configuration(case.family, case.shape)
    with no_init_weights(), torch.device("cpu"):
        torch.set_default_dtype(dtype)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    model.tie_weights()
    if case.lora_rank:
        model = _adapt(model, case.lora_rank)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _adapt(model: Any, rank: int) -> Any:
    """LoRA on every linear layer. Fake parameters can't be moved, so PEFT's moves are left out; dtypes stay its own."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
    stay = mock.patch.object(BaseTunerLayer, "_move_adapter_to_device_of_base_layer", return_value=None)
    keep = mock.patch.object(nn.Module, "to", lambda module, *_, **__: module)
    with stay, keep:
        adapted = get_peft_model(model, settings, autocast_adapter_dtype=False)
    adapted.enable_input_require_grads()
    return adapted


@dataclass(frozen=True)
class Account:
    """What one case needs, in bytes, as torch.cuda.max_memory_allocated would read it."""

    parameters: int
    trained: int
    static: int
    phases: dict[str, int]
    ops: dict[str, str]

    @property
    def peak(self) -> int:
        """The highest phase."""
        return max(self.phases.values())


def account(case: Case) -> Account:
    """Accounts for one case; the same numbers on every call.

    Cyclic garbage would be collected at moments that depend on the interpreter's history, so automatic collection is
    off and garbage is collected between phases only: within a phase everything unreachable but cyclic counts as live,
    which is the most that a real run can hold.
    """
    gc.collect()
    gc.disable()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), substituted():
            return _account(case)
    finally:
        gc.enable()
        gc.collect()


def _account(case: Case) -> Account:
    """Runs all phases under one ledger; two micro-batches, the second on top of the first one's gradients."""
    ledger = Ledger()
    run = Run(case, ledger)
    with ledger:
        states = run.optimizer_state()
        static = ledger.bytes
        run.generate()
        run.reference()
        run.update()
        first = dict(run.phases)
        run.phases.clear()
        run.update()
        phases = first | {f"accumulating {name}": peak for name, peak in run.phases.items()}
        del states
    unique = {id(parameter): parameter.numel() for parameter in run.model.parameters()}
    return Account(
        sum(unique.values()), sum(parameter.numel() for parameter in run.trained), static, phases, dict(run.ops)
    )
