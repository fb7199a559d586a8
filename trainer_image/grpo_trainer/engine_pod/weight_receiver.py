"""What an engine's worker process does with weights: it receives each tensor, loads it and hashes
it in place.

vLLM mixes WeightsWorker into its worker, in the process with the live model, and calls its methods
by name (`collective_rpc`). The call comes from the same process (Colocated) or over vLLM's own wire
(Servers). So they take and return plain values. ReceivingWorker adds the sync of Servers: a tensor
goes from rank 0 straight into the process that holds the live model.

Nothing is sent for buffers, such as rotary tables and scales, and the engine computes with them all
the same. The worker hashes them when it learns the layout, and every later proof names those that
have changed since. It does so after vLLM's sleep, too, which saves and restores them. Where
parameters lie, how they read it, and the numbers of modules may not change either.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from .hash_check import new_seed, tensor_hash
from .transfer import Meeting, WeightGroup, join_group
from .vllm_arguments import LOGITS_TEMPERATURE
from .weight_layout import Layout, Strided, learn_layout, live_part, parameter_views

COMPILATION = ("compiled", "first_compile", "was_aot_compile_fn_loaded_from_disk")
"""Flags that change as vLLM compiles its model (vllm/compilation/wrapper.py)."""
SLOPES = "alibi_slopes"
"""Of attention with linear biases: a tensor of the `impl`."""
ATTENTION = ("scale", "sliding_window", "logits_soft_cap", SLOPES)
"""Numbers that every backend of attention computes with, which is no module but a module's
`impl`."""


class WeightsWorker:
    """Methods for loading and proving the weights of this worker's part of the model."""

    model_runner: Any
    vllm_config: Any
    _compute_logits: Callable[..., torch.Tensor | None] | None = None
    _weights_layout: Layout
    _fixed_seed: int
    _fixed_parts: dict[str, object]

    def weights_learn(
        self, shapes: dict[str, list[int]], dtype: str
    ) -> tuple[dict[str, list[Strided | None]], list[str]]:
        """Learn where the tensors with these names and shapes go; the live weights are meaningless
        afterwards.

        Returns:
            By name, the parts of the sent tensor that are written, None for zeros; and why there is
            no proof, if so.
        """
        self._divide_logits()
        self._keep_slopes()
        model = self.model_runner.model
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        # The model's own loader fuses and splits the tensors. What it writes is what a proof has to
        # cover.
        self._weights_layout = layout = learn_layout(
            model, model.load_weights, sizes, getattr(torch, dtype)
        )
        self._fixed_seed = new_seed()
        self._fixed_parts = self._describe_fixed()
        sources: dict[str, list[Strided | None]] = {}
        for name, group in layout.writes.items():
            sources[name] = [write.source for write in group]
        return sources, layout.problems

    def _keep_slopes(self) -> None:
        """Make buffers of attention's slopes: vLLM's sleep saves and restores buffers alone
        (v1/worker/gpu_worker.py), and what lies beside them is anything afterwards."""
        for module in self.model_runner.model.modules():
            slopes = getattr(getattr(module, "impl", None), SLOPES, None)
            if isinstance(slopes, torch.Tensor):
                module.register_buffer(SLOPES, slopes, persistent=False)

    def logprobs_switch(self, mode: str) -> None:
        """Return log-probabilities of this kind (vLLM's logprobs_mode) from the next token on."""
        sampler = self.model_runner.sampler
        sampler.logprobs_mode = mode
        # Model runner V1 cuts, and takes processed log-probabilities, in a module of its own.
        if hasattr(sampler, "topk_topp_sampler"):
            sampler.topk_topp_sampler.logprobs_mode = mode

    def _divide_logits(self) -> None:
        """Let the live model return its logits at the run's temperature (see
        logits_temperature)."""
        temperature = self.vllm_config.additional_config.get(LOGITS_TEMPERATURE)
        if temperature is None:
            return
        model = self.model_runner.model
        # The model's own method, also where this is called again.
        compute_logits = self._compute_logits = self._compute_logits or model.compute_logits

        def compute_divided_logits(*arguments: Any, **named: Any) -> torch.Tensor | None:
            logits = compute_logits(*arguments, **named)
            # With tensor parallelism only one rank may have them. The trainer, too, divides in
            # float32: in bfloat16 a logit of 20 is rounded by up to 0.06.
            return None if logits is None else logits.float().div_(temperature)

        model.compute_logits = compute_divided_logits

    def weights_load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one whole weight of the policy, contiguous and in the engine's dtype, into the live
        model, by the model's own code."""
        self.model_runner.model.load_weights([(name, tensor)])

    def weights_prints(self, seed: int) -> dict[str, list[int]]:
        """Hashes of what each name has written, as it lies in the live model now, in the order of
        `weights_learn`; and whatever else has changed since, under a name that was never sent, so
        that the comparison fails with it."""
        model = self.model_runner.model
        fixed = self._describe_fixed()
        changed = {
            name
            for name in fixed.keys() | self._fixed_parts.keys()
            if fixed.get(name) != self._fixed_parts.get(name)
        }
        prints = {name: [0] for name in changed}
        for name, group in self._weights_layout.writes.items():
            # A parameter that is gone, or lies otherwise, can't be read as it was learnt.
            prints[name] = [
                tensor_hash(live_part(model, write), seed)
                for write in group
                if f"{write.parameter} (view)" not in changed
            ]
        return prints

    def _describe_fixed(self) -> dict[str, object]:
        """What no sync changes, by name: buffers with their hashes, parameters with their views,
        and the numbers and flags that modules compute with, such as epsilons and windows. vLLM also
        keeps the cache's scales as numbers, and in tensors that are no buffers."""
        model = self.model_runner.model
        fixed: dict[str, object] = {
            f"{name} (buffer)": (
                buffer.dtype,
                buffer.shape,
                tensor_hash(buffer, self._fixed_seed),
            )
            for name, buffer in model.named_buffers()
        }
        for name, view in parameter_views(model).items():
            fixed[f"{name} (view)"] = view
        holders: list[tuple[str, object]] = [*model.named_modules()]
        # Granite reads its multiplier there in every pass.
        if hasattr(model, "config"):
            holders.append(("config", model.config))
        for name, holder in holders:
            for attribute, value in vars(holder).items():
                if isinstance(value, float | int) and attribute not in COMPILATION:
                    fixed[f"{name}.{attribute}"] = repr(value)
                elif isinstance(value, torch.Tensor) and attribute.endswith("_scale_cpu"):
                    fixed[f"{name}.{attribute}"] = _exact_text(value)
                elif attribute == "impl":
                    numbers = [getattr(value, number, None) for number in ATTENTION]
                    fixed[f"{name}.impl"] = tuple(map(_exact_text, numbers))
        return fixed


def _exact_text(value: object) -> str:
    """A value with all digits of all elements, where a tensor's own repr has four."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


class ReceivingWorker(WeightsWorker):
    """vLLM's `worker_extension_cls` for engines in pods of their own."""

    model_config: Any
    device: Any
    rank: int
    _weights_group: WeightGroup | None = None

    def weights_receive(
        self, meeting: dict[str, Any], version: int, tensors: list[tuple[str, list[int]]]
    ) -> None:
        """Receives and loads all tensors (names and shapes) in this order; joins the group first if
        it is a new one. `meeting` has the fields of a Meeting.

        Raises:
            TransferFailed: a tensor did not come; what lies in the engine is of no version.
        """
        group = self._join_weights_group(Meeting(**meeting))
        try:
            for name, shape in tensors:
                buffer = torch.empty(shape, dtype=self.model_config.dtype, device=self.device)
                group.broadcast(buffer, f"{name} of version {version}")
                self.weights_load(name, buffer)
        # A group that broke off is of no use, and rank 0 would wait until this side leaves it.
        except BaseException:
            self._weights_group = None
            group.leave()
            raise

    def _join_weights_group(self, meeting: Meeting) -> WeightGroup:
        group = self._weights_group
        if group is None or asdict(group.meeting) != asdict(meeting):
            if group is not None:
                group.leave()
            self._weights_group = group = join_group(meeting, 1 + self.rank)
        return group
