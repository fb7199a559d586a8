"""Memory of a step, measured phase by phase on real models and set beside the plan's prediction.

The models have the widths of real ones and random weights, made on the device. Passes, generation,
fused head and optimizer are those of training, without the trainer around them. The cases and their
predictions are in predictions.json, which grpo_codegen writes: this package may not import the
planner.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache
from trl.trainer.utils import add_fused_lm_head

from grpo_trainer.telemetry.phases import device_bytes

from .findings import (
    GIB,
    Case,
    Context,
    Finding,
    case_title,
    cases,
    compare_with_prediction,
    skipped_finding,
)

CLASSES = {"qwen2": "Qwen2Config", "llama": "LlamaConfig"}
STEPS = 3
"""The second is shorter, so that the third meets a fragmented allocator; the third is measured."""
SHORT = 16
"""Tokens that are generated after the prompts, and after all but the last tokens of the
completions."""
PADDED = 1
"""Tokens by which one row of a batch is shorter: without padding transformers makes no mask, and
attention saves less than in training."""


def measure_case(_: Context, number: int) -> list[Finding]:
    """One case on the GPU; each in a process of its own, for a clean allocator."""
    case = cases()[number]
    total = torch.cuda.mem_get_info()[1]
    if case["device_bytes"] > total:
        why = f"needs {case['device_bytes'] / GIB:.1f} GiB, the GPU has {total / GIB:.1f}"
        return [skipped_finding(case_title(case), why)]
    peaks = Run(case, "cuda").measure_peaks()
    return [compare_with_prediction(case, peaks, device_bytes())]


class Run:
    """One case's model and optimizer, and its steps."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.peaks: dict[str, int] = {}
        is_bfloat16 = case["precision"] == "bfloat16"
        self.dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        has_adapter_in_bfloat16 = bool(case["lora_rank"]) and is_bfloat16
        self.autocast = case["precision"] == "mixed" or has_adapter_in_bfloat16
        self.model = self._make()
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6, fused=True)

    def measure_peaks(self) -> dict[str, int]:
        """Peak of allocated bytes by phase of the last step. Loading is left out: no trainer loads
        these models."""
        for step in range(STEPS):
            self.peaks.clear()
            self.step(shorter=step == 1)
        return dict(self.peaks)

    def step(self, shorter: bool) -> None:
        """Generate, score with the reference, accumulate, and update."""
        quarters = 3 if shorter else 4
        prompt = self.case["prompt"] * quarters // 4
        completion = self.case["completion"] * quarters // 4
        self._generate(prompt, completion)
        ids, labels = self._batch(prompt, completion)
        self._reference(ids, labels)
        self._checkpointing(self.case["checkpointing"])
        for _ in range(self.case["accumulation"]):
            with self.phase("forward"):
                scores = self._scores(ids, labels)
                loss = -torch.exp(scores - scores.detach()).mean()
            with self.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        with self.phase("step"):
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keeps the peak of what runs within; a phase that runs twice keeps its higher one."""
        gc.collect()
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        yield
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        self.peaks[name] = max(peak, self.peaks.get(name, 0))

    def _make(self) -> Any:
        """The model on the device, with TRL's head; inside PEFT's wrapper for an adapter."""
        make_shape = getattr(transformers, CLASSES[self.case["family"]])
        shape = make_shape(**self.case["config"], pad_token_id=0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(shape, dtype=self.dtype)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if not self.case["lora_rank"]:
            return model
        rank = self.case["lora_rank"]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        wrapped = get_peft_model(model, config)
        wrapped.enable_input_require_grads()
        return wrapped

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast)

    def _batch(
        self, prompt: int, completion: int, rows: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens and labels of [rows, tokens]; only completions are scored."""
        shape = (rows or self.case["micro_batch"], prompt + completion)
        ids = torch.randint(5, self.case["config"]["vocab_size"], shape, device=self.device)
        labels = ids.clone()
        labels[:, :prompt] = -100
        return ids, labels

    def _scores(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self._cast():
            out = self.model(
                input_ids=ids,
                attention_mask=_padding_mask(ids),
                labels=labels,
                use_cache=False,
                fused_lm_head=True,
            )
        scores: torch.Tensor = out.log_probs
        return scores

    def _generate(self, prompt: int, completion: int) -> None:
        """Generate the first tokens of completions, and the last ones.

        The tokens between them change no peak, and take a minute: the prompts' pass has the highest
        activations, and the last token the largest cache.
        """
        self.model.eval()
        self._checkpointing(False)
        with self.phase("generate"), torch.no_grad(), self._cast():
            self._sample(prompt, None)
            before_last = prompt + completion - SHORT
            self._sample(before_last, self._filled_cache(before_last - 1))
        self.model.train()

    def _sample(self, tokens: int, cache: DynamicCache | None) -> None:
        """Generate SHORT tokens after `tokens`, of which all but one may be in the cache."""
        ids, _ = self._batch(tokens, 0, self.case["generation_batch"])
        self.model.generate(
            input_ids=ids, attention_mask=_padding_mask(ids), past_key_values=cache,
            min_new_tokens=SHORT, max_new_tokens=SHORT,
            do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip

    def _filled_cache(self, tokens: int) -> DynamicCache:
        """A cache of zeros for `tokens` of each sequence, in the dtype of the weights."""
        config = self.case["config"]
        cache = DynamicCache(config=self.model.config)
        shape = (
            self.case["generation_batch"], config["num_key_value_heads"], tokens,
            config["head_dim"],
        )  # fmt: skip
        for layer in range(config["num_hidden_layers"]):
            zeros = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
            cache.update(*zeros, layer)
        return cache

    def _reference(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        """A pass without gradients. The policy stands in for a frozen copy, so it is frozen:
        autocast keeps casts of trained weights only."""
        has_adapter = bool(self.case["lora_rank"])
        adapters_off = self.model.disable_adapter() if has_adapter else contextlib.nullcontext()
        for parameter in self.trained:
            parameter.requires_grad_(False)
        with self.phase("reference"), torch.no_grad(), adapters_off:
            self._scores(ids, labels)
        for parameter in self.trained:
            parameter.requires_grad_(True)

    def _checkpointing(self, on: bool) -> None:
        if on:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        elif self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()


def _padding_mask(ids: torch.Tensor) -> torch.Tensor:
    """Attention mask of [rows, tokens] in which the last row begins with padding."""
    mask = torch.ones_like(ids)
    mask[-1, :PADDED] = 0
    return mask
