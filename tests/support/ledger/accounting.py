"""Runs one GRPO step's phases of the real code on fake tensors and reports each phase's peak in
bytes.

This is the truth against which the planner's closed form is checked. Real: transformers' model
classes, PEFT's layers, checkpointing, autocast, TRL's chunked log-probabilities. Fake: the tensors,
and the CUDA kernels (kernels.py).
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils as trl_utils

from .fake_models import Case, build
from .kernels import substituted
from .ledger import Ledger

CHUNK: int = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
"""TRL's vocabulary tile. Its module is imported here, and not first inside a backward pass, where
TRL would import it: an import that keeps an exception keeps the frames below it, and the first
account would count their tensors."""


class Run:
    """One case, phase by phase, on fake tensors."""

    def __init__(self, case: Case, ledger: Ledger) -> None:
        """Builds the model and its optimizer state, counted by the ledger."""
        self.case, self.ledger = case, ledger
        self.phases: dict[str, int] = {}
        self.ops: dict[str, str] = {}
        dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
        self.model = build(case, dtype)
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        ledger.add(*self.model.parameters(), *self.model.buffers())
        self.autocast = case.precision == "mixed" or bool(
            case.lora_rank and case.precision == "bfloat16"
        )
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
        """AdamW's two moments per trained parameter; in 8 bits as bitsandbytes keeps them
        (test_memory_savers.py)."""
        states = []
        embedding = self.base.get_input_embeddings().weight
        for parameter in self.trained:
            wide = parameter.numel() < 4096 or parameter is embedding
            blocks = -(-parameter.numel() // 256)
            for _ in range(2):
                if self.case.eight_bit and not wide:
                    states += [torch.zeros(parameter.shape, dtype=torch.uint8), torch.zeros(blocks)]
                else:
                    states.append(
                        torch.zeros(parameter.shape)
                        if self.case.eight_bit
                        else torch.zeros_like(parameter)
                    )
        return states

    def generate(self) -> None:
        """Prefill and the last decoding step, with the cache grown to its last length, as
        transformers generates."""
        case, rows = self.case, self.case.generation_batch
        self.model.eval()
        ids, mask = _batch(rows, case.prompt)
        with self.phase("generate"), torch.no_grad():
            with self.cast():  # type: ignore[no-untyped-call]
                out = self.base(
                    input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1
                )
            cache = out.past_key_values
            _sample(out.logits, case.top_p)
            del out
        _grow(cache, case.completion - 2)
        with self.phase("generate"), torch.no_grad():
            mask = torch.ones(rows, case.prompt + case.completion - 1, dtype=torch.long)
            with self.cast():  # type: ignore[no-untyped-call]
                out = self.base(
                    input_ids=ids[:, :1],
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            _sample(out.logits, case.top_p)
            del out, cache
        self.model.train()

    def reference(self) -> None:
        """The reference's log-probabilities: no gradients, no checkpointing, adapters disabled.

        The policy stands in for its frozen copy: what counts here is what the pass adds. Frozen
        weights matter, since autocast caches the casts of trained ones only.
        """
        self.checkpointing(False)
        for parameter in self.trained:
            parameter.requires_grad_(False)
        adapters_off = (
            self.model.disable_adapter() if self.case.lora_rank else contextlib.nullcontext()
        )
        with self.phase("reference"), torch.no_grad(), adapters_off:
            self.log_probs()
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.checkpointing(self.case.checkpointing)

    def checkpointing(self, on: bool) -> None:
        """Switches gradient checkpointing as TRL does."""
        if on:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        elif self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()

    def log_probs(self) -> tuple[Tensor, Tensor]:
        """TRL's fused head on a CUDA device: only completion tokens are packed and scored, in
        tiles."""
        case = self.case
        ids, mask = _batch(case.micro_batch, case.prompt + case.completion)
        with self.cast():  # type: ignore[no-untyped-call]
            hidden = self.base.model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).last_hidden_state[:, :-1]
            index = torch.zeros(case.micro_batch * case.completion, dtype=torch.long)
            packed = (
                hidden.reshape(-1, hidden.shape[-1])[index]
                if hidden.is_contiguous()
                else _pack(hidden, index)
            )
            head = self.base.get_output_embeddings()
            scored = ChunkedLogProbFunction.apply(
                packed, head.weight, None, ids[:, -case.completion :].reshape(-1), 1.0, CHUNK, None,
                1.0,
                ("log_probs", "entropy"),
            )  # fmt: skip
        return scored[0], scored[1]

    def update(self) -> None:
        """One micro-batch, forward and backward, with GRPO's clipped ratio and k3 penalty."""
        with self.phase("forward"):
            log_probs, entropies = self.log_probs()
            ratio = torch.exp(log_probs - log_probs.detach())
            reference = torch.zeros_like(log_probs)
            penalty = torch.exp(reference - log_probs) - (reference - log_probs) - 1
            loss = (-torch.min(ratio, torch.clamp(ratio, 0.8, 1.2)) + 0.04 * penalty).mean()
            if self.case.entropy_bonus:
                loss = loss - 0.1 * entropies.mean()
            del ratio, penalty, reference, log_probs, entropies
        with self.phase("backward"), self.ledger.backward():
            loss.backward()  # type: ignore[no-untyped-call]
            del loss


def _sample(logits: Tensor, top_p: float) -> None:
    """The next token, as transformers' `_sample` draws it at a temperature other than 1."""
    wide = logits[:, -1].to(copy=True, dtype=torch.float32)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.9)])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), wide)
    shares = F.softmax(scores, dim=-1)
    # multinomial divides the shares by exponential noise, in a tensor that is the kernel's own.
    torch.empty_like(shares)


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
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length += tokens
        if room > 0:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                setattr(
                    layer,
                    name,
                    torch.cat([old, old.new_empty(*old.shape[:2], room, old.shape[3])], -2),
                )


@dataclass(frozen=True, kw_only=True)
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

    Cyclic garbage would be collected at moments that depend on the interpreter's history, so
    automatic collection is off and garbage is collected between phases only: within a phase
    everything unreachable but cyclic counts as live, which is the most that a real run can hold.
    What was there before is frozen: to look at all that torch and a session of tests hold takes
    most of the time otherwise, sixteen times a case.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), substituted():
            return _account(case)
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()


def _account(case: Case) -> Account:
    """Runs all phases under one ledger; two micro-batches, the second on top of the first one's
    gradients."""
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
        parameters=sum(unique.values()),
        trained=sum(parameter.numel() for parameter in run.trained),
        static=static,
        phases=phases,
        ops=dict(run.ops),
    )
