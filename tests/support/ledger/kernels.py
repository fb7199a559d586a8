"""Stand-ins for CUDA kernels on fake tensors: they compute nothing and allocate what the kernels
allocate.

A build of torch without CUDA decomposes attention and TRL's tiles into operations with other
footprints than the GPU's.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import trl.kernels.chunked_logprob as tiles
from torch import Tensor


def _like_output(query: Tensor) -> Tensor:
    """Attention output: [batch, heads, tokens, dim], stored as [batch, tokens, heads, dim], as the
    kernel writes it."""
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim).transpose(1, 2)


class EfficientAttention(torch.autograd.Function):
    """aten::_efficient_attention_forward/backward, which CUDA chooses when there is a mask: saves
    the bias too."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Returns an output like the query; its log-sum-exp rows are padded to 32."""
        out = _like_output(query)
        rows = -(-query.shape[2] // 32) * 32
        ctx.save_for_backward(
            query,
            key,
            value,
            bias,
            out,
            query.new_empty(*query.shape[:2], rows, dtype=torch.float32),
        )
        return out

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients, beside the kernel's float32 accumulator of dQ where the inputs are
        narrower."""
        query, key, value, _, _, row_max = ctx.saved_tensors
        workspace = [torch.empty_like(row_max)]
        if query.dtype != torch.float32:
            workspace.append(torch.empty_like(query, dtype=torch.float32))
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_settings: Any
) -> Tensor:
    """scaled_dot_product_attention as CUDA dispatches it when there is a boolean mask: the bias is
    made per call."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (
            tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value)
        )
    assert attn_mask is not None, "a GRPO batch is padded, so every call has a mask"
    bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
        attn_mask.logical_not(), -math.inf
    )
    pad = -bias.shape[-1] % 8
    return EfficientAttention.apply(query, key, value, F.pad(bias, (0, pad)) if pad else bias)  # type: ignore[no-untyped-call, no-any-return]


class GroupedProduct(torch.autograd.Function):
    """grouped_mm: rows sorted by expert times each expert's matrix, in the dtype of both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns a row each; saves what the gradients that are wanted need."""
        ctx.save_for_backward(
            rows if ctx.needs_input_grad[1] else None, weights if ctx.needs_input_grad[0] else None
        )
        ctx.rows, ctx.weights = rows.shape, (weights.shape, weights.stride())
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of rows and matrices, the latter laid out as the weights are stored."""
        rows = grad.new_empty(ctx.rows) if ctx.needs_input_grad[0] else None
        return rows, grad.new_empty_strided(*ctx.weights) if ctx.needs_input_grad[1] else None


def grouped_product(rows: Tensor, weights: Tensor, *, offs: Tensor, **_settings: Any) -> Tensor:
    """torch.nn.functional.grouped_mm, whose meta function knows bfloat16 only."""
    assert offs.shape[0] == weights.shape[0], "an offset per expert"
    return GroupedProduct.apply(rows, weights)  # type: ignore[no-untyped-call, no-any-return]


def sort(scores: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """torch.sort of float32 rows on CUDA (SortStable.cu): a few rows are sorted as one, by int2
    places and rows, of which there are two arrays beside the sorted keys; one row or many by int64
    places. cub copies keys and places. Of other tensors, such as ids of experts, the result alone
    counts."""
    values, places = torch.ops.aten.sort(scores, -1, descending)
    if scores.dim() == 1:
        return values, places
    rows = scores.shape[0]
    sorted_along = [torch.empty_like(places)]
    if 1 < rows < 128:
        sorted_along += [torch.empty_like(places), torch.empty_like(values)]
    cub = torch.empty_like(values), torch.empty_like(places)
    del sorted_along, cub
    return values, places


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """A Triton tile or cuBLAS call that works in place and allocates nothing."""


@contextmanager
def substituted() -> Iterator[None]:
    """Within, attention and TRL's tiles have their CUDA footprint."""
    with (
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(F, "grouped_mm", grouped_product),
        mock.patch.object(torch, "sort", sort),
        mock.patch.object(tiles, "_forward_tile", _nothing),
        mock.patch.object(tiles, "_backward_tile", _nothing),
        mock.patch.object(tiles, "_addmm_fp32", _nothing),
    ):
        yield
