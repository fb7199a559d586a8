"""Learning where an engine keeps weights, on models that load as vLLM's do: fused, split over GPUs,
padded, derived."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo_trainer.engine_pod.hash_check import differing_names, expected_prints, tensor_hash
from grpo_trainer.engine_pod.layout import Layout, learn_layout, live_part

Weights = Iterable[tuple[str, torch.Tensor]]


class Fused(nn.Module):
    """Parts of several tensors in one parameter, of which this engine holds one of `ranks` shares
    of the rows."""

    def __init__(
        self, rows: list[int], columns: int, ranks: int = 1, rank: int = 0, padding: int = 0
    ) -> None:
        super().__init__()
        self.rows, self.ranks, self.rank = rows, ranks, rank
        self.fused = nn.Parameter(torch.zeros(sum(rows) // ranks + padding, columns))
        self.down = nn.Parameter(torch.zeros(columns, 4 * ranks)[:, :4].contiguous())
        self.skipped = ""

    def load_weights(self, weights: Weights) -> None:
        """Each name to its place, as vLLM's weight loaders copy it."""
        for name, tensor in weights:
            if name == self.skipped:
                continue
            if name == "down":
                self.down.data.copy_(tensor.narrow(1, 4 * self.rank, 4))
            else:
                self.load_part(int(name), tensor)

    def load_part(self, part: int, tensor: torch.Tensor) -> None:
        """The share of one tensor's rows, and zeros behind the last."""
        size = self.rows[part] // self.ranks
        begin = sum(self.rows[:part]) // self.ranks
        self.fused.data[begin : begin + size].copy_(tensor.narrow(0, self.rank * size, size))
        if part == len(self.rows) - 1:
            self.fused.data[begin + size :].fill_(0)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What is sent."""
        columns = self.fused.size(1)
        parts: dict[str, tuple[int, ...]] = {
            str(part): (size, columns) for part, size in enumerate(self.rows)
        }
        return parts | {"down": (columns, 4 * self.ranks)}


def sent(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def wrong(
    model: nn.Module, layout: Layout, tensors: dict[str, torch.Tensor], seed: int
) -> list[str]:
    """The names that a proof finds to differ."""
    wanted = {
        name: expected_prints(tensor, [write.source for write in layout.writes[name]], seed)
        for name, tensor in tensors.items()
    }
    found = {
        name: [tensor_hash(live_part(model, write), seed) for write in group]
        for name, group in layout.writes.items()
    }
    return differing_names(wanted, found)


ENGINES = st.builds(
    lambda parts, columns, ranks, rank, padding: Fused(
        [part * ranks for part in parts], columns, ranks, rank % ranks, padding
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(engine=ENGINES, seed=st.integers(0, 2**62))
def test_a_sync_is_proven_and_every_element_that_differs_is_named(engine: Fused, seed: int) -> None:
    layout = learn_layout(engine, engine.load_weights, engine.shapes, torch.float32)
    assert layout.problems == []
    tensors = sent(engine.shapes, 1)
    engine.load_weights(tensors.items())
    assert wrong(engine, layout, tensors, seed) == []
    for name, group in layout.writes.items():
        for write in group:
            view = live_part(engine, write)
            if view.numel():
                before = view.clone()
                view.view(torch.int32).bitwise_xor_(
                    torch.zeros_like(view, dtype=torch.int32).fill_(1 << 13)
                )
                assert wrong(engine, layout, tensors, seed) == [name]
                view.copy_(before)


@given(engine=ENGINES, data=st.data())
def test_a_tensor_that_a_sync_skips_is_named(engine: Fused, data: st.DataObject) -> None:
    layout = learn_layout(engine, engine.load_weights, engine.shapes, torch.float32)
    engine.load_weights(sent(engine.shapes, 1).items())
    engine.skipped = data.draw(st.sampled_from(list(engine.shapes)))
    tensors = sent(engine.shapes, 2)
    engine.load_weights(tensors.items())
    assert wrong(engine, layout, tensors, 9) == [engine.skipped]


def test_a_tied_parameter_is_written_once() -> None:
    engine = Fused([4, 4], 3)
    engine.head = nn.Parameter(engine.fused.data)  # another parameter on the same memory
    assert learn_layout(engine, engine.load_weights, engine.shapes, torch.float32).problems == []


class Deriving(Fused):
    """Computes a parameter of what it is sent."""

    def load_part(self, part: int, tensor: torch.Tensor) -> None:
        """Another value than the one that was sent."""
        super().load_part(part, tensor)
        self.fused.data.mul_(2)


class Casting(Fused):
    """Makes a tensor of its own of the one that is sent, and copies that."""

    def load_part(self, part: int, tensor: torch.Tensor) -> None:
        """A copy of a copy: what became of the bits in between is not known."""
        super().load_part(part, tensor * 1.0)


class FusedMoE(nn.Module):
    """By its name, a layer that computes with tensors in another order."""


def problem_of(engine: nn.Module, shapes: dict[str, tuple[int, ...]]) -> str:
    """The only reason why there is no proof."""
    problems = learn_layout(engine, engine.load_weights, shapes, torch.float32).problems  # type: ignore[arg-type]
    assert problems
    return problems[0]


def test_what_can_t_be_proven_is_refused_with_the_reason() -> None:
    shapes = Fused([4, 4], 3).shapes
    assert "aten::mul_ derives fused" in problem_of(Deriving([4, 4], 3), shapes)
    assert "aten::copy_ derives fused" in problem_of(Casting([4, 4], 3), shapes)
    plain = Fused([4, 4], 3)
    plain.skipped = "1"
    assert problem_of(plain, plain.shapes) == "1: the engine has no place for it"
    plain = Fused([4, 4], 3)
    plain.unsent = nn.Parameter(torch.zeros(5))
    assert "unsent: 5 of 5 elements are filled by nothing" in problem_of(plain, plain.shapes)
    packed = Fused([4, 4], 3)
    packed.packed = nn.Parameter(torch.empty(0))
    assert "packed: its values are packed away" in problem_of(packed, packed.shapes)
    sparse = Fused([4, 4], 3)
    sparse.experts = FusedMoE()
    assert "FusedMoE computes with tensors that it derives" in problem_of(sparse, sparse.shapes)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_part_that_is_not_sent_leaves_a_hole(missing: int) -> None:
    engine = Fused([4, 8], 3)
    shapes = {name: shape for name, shape in engine.shapes.items() if name != str(missing)}
    assert f"fused: {engine.rows[missing] * 3} of 36 elements" in problem_of(engine, shapes)


def test_writes_of_one_name_keep_their_order() -> None:
    engine = Fused([4, 4, 4], 3)
    writes = learn_layout(engine, engine.load_weights, engine.shapes, torch.float32).writes
    offsets = [writes[str(part)][0].target[0] for part in range(3)]
    assert all(first < second for first, second in pairwise(offsets))
