"""What an engine's worker does with weights: vLLM mixes this class into its worker, in the process with the live model.

Methods are called by name through `collective_rpc`, in the same process (Colocated) or over vLLM's own wire (Servers),
so they take and return plain values.
"""

from typing import Any

import torch

from .layout import Layout, Strided, learn, live
from .multilinear import multilinear_hash


class WeightsWorker:
    """Methods for loading and proving the weights of this worker's part of the model."""

    model_runner: Any
    _weights_layout: Layout

    def weights_learn(
        self, shapes: dict[str, list[int]], dtype: str
    ) -> tuple[dict[str, list[Strided | None]], list[str]]:
        """Learn where the tensors with these names and shapes go; the live weights are meaningless afterwards.

        Returns:
            By name, the parts of the sent tensor that are written, None for zeros; and why there is no proof, if so.
        """
        model = self.model_runner.model
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        # The model's own loader fuses and splits the tensors. What it writes is what a proof has to cover.
        self._weights_layout = layout = learn(model, model.load_weights, sizes, getattr(torch, dtype))
        sources: dict[str, list[Strided | None]] = {}
        for name, group in layout.writes.items():
            sources[name] = [write.source for write in group]
        return sources, layout.problems

    def weights_load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor into the live model, by the model's own code."""
        self.model_runner.model.load_weights([(name, tensor)])

    def weights_prints(self, seed: int) -> dict[str, list[int]]:
        """Hashes of what each name has written, as it lies in the live model now, in the order of `weights_learn`."""
        model = self.model_runner.model
        prints: dict[str, list[int]] = {}
        for name, group in self._weights_layout.writes.items():
            prints[name] = [multilinear_hash(live(model, write), seed) for write in group]
        return prints
