"""Learning where an engine keeps weights, on models that load as vLLM's do: fused, split over GPUs,
padded, derived."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo_trainer.engine_pod.hash_check import differing_names, expected_prints, tensor_hash
from grpo_trainer.engine_pod.weight_layout import Layout, learn_layout, live_part
from grpo_trainer.engine_pod.weight_receiver import WeightsWorker

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


def test_buffers_that_vllm_makes_itself_need_not_be_sent() -> None:
    engine = Fused([4, 4], 3)
    engine.register_buffer("_k_scale", torch.ones(1))
    engine.register_buffer("positions", torch.arange(4))
    engine.register_buffer("table", torch.ones(4), persistent=False)
    assert learn_layout(engine, engine.load_weights, engine.shapes, torch.float32).problems == []


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


class Shifting(Fused):
    """Changes the sent tensor in place, maybe in the policy's own memory, and copies that."""

    def load_part(self, part: int, tensor: torch.Tensor) -> None:
        """As vLLM's Plamo2 loads its norms."""
        tensor += 1.0
        super().load_part(part, tensor)


class Doubling(Fused):
    """The same, by a function that is told where its result goes."""

    def load_part(self, part: int, tensor: torch.Tensor) -> None:
        """Twice what is sent."""
        super().load_part(part, torch.mul(tensor, 2, out=tensor))


class Widening(Fused):
    """Keeps a parameter in another type than the weights are sent in."""

    def __init__(self, rows: list[int], columns: int) -> None:
        super().__init__(rows, columns)
        self.down = nn.Parameter(self.down.double())


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
    assert problem_of(Shifting([4, 4], 3), shapes) == "0: the engine changes it by aten::add_"
    assert problem_of(Doubling([4, 4], 3), shapes) == "0: the engine changes it by aten::mul"
    assert "aten::copy_ derives down" in problem_of(Widening([4, 4], 3), shapes)
    plain = Fused([4, 4], 3)
    plain.skipped = "1"
    assert problem_of(plain, plain.shapes) == "1: the engine has no place for it"
    plain = Fused([4, 4], 3)
    plain.unsent = nn.Parameter(torch.zeros(5))
    assert "unsent: 5 of 5 elements are filled by nothing" in problem_of(plain, plain.shapes)
    scaled = Fused([4, 4], 3)
    scaled.register_buffer("layer_scalar", torch.ones(1))
    assert "layer_scalar: a buffer of the checkpoint" in problem_of(scaled, scaled.shapes)
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


class Network(nn.Module):
    """What an engine may hold: a head of its own or the embedding, norms, biases, a rotary table,
    the cache's scale, which vLLM keeps as a buffer, as a number and as a tensor, and flags and
    numbers of its own, of a backend and of its configuration."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.square, self.norm = nn.Linear(4, 4), nn.LayerNorm(4, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(16.0).view(4, 4), persistent=False)
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self._k_scale_float = 1.0
        self._k_scale_cpu = torch.tensor(1.0)
        self.is_neox_style, self.compiled = True, False
        self.impl = SimpleNamespace(
            scale=0.5,
            sliding_window=(-1, -1),
            logits_soft_cap=None,
            alibi_slopes=torch.tensor([0.5, 0.25]),
        )
        self.config = SimpleNamespace(embedding_multiplier=2.0)

    def load_weights(self, weights: Weights) -> None:
        """Each to the parameter of its name."""
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def permuted(values: torch.Tensor) -> torch.Tensor:
    """The rows, or elements, in another order."""
    return values.roll(1, 0)


def with_infinity(values: torch.Tensor, value: float) -> torch.Tensor:
    """The last element replaced."""
    changed = values.clone()
    changed.view(-1)[-1] = value
    return changed


def last_bit_flipped(values: torch.Tensor) -> torch.Tensor:
    """The lowest bit of the last element."""
    changed = values.clone()
    changed.view(-1).view(torch.int32)[-1] ^= 1
    return changed


def cancelling(values: torch.Tensor) -> torch.Tensor:
    """As much more in the first element's bits as less in the last's."""
    changed = values.clone()
    changed.view(-1).view(torch.int32)[0] += 8
    changed.view(-1).view(torch.int32)[-1] -= 8
    return changed


def other_payload(values: torch.Tensor) -> torch.Tensor:
    """Bits of a NaN."""
    changed = values.clone()
    changed.view(-1).view(torch.int32)[-1] = 0x7FC00001
    return changed


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "permuted": permuted,
    "last bit": last_bit_flipped,
    "cancelling": cancelling,
    "NaN": other_payload,
    "infinite": lambda values: with_infinity(values, float("inf")),
    "negative zero": lambda values: with_infinity(values, -0.0),
    "reversed": lambda values: values.flip(0),
    "rounded": lambda values: values.bfloat16().float(),
    "doubled": lambda values: values * 2,
    "dtype of the same values": lambda values: values.double(),
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype of the same bits": lambda values: values.view(torch.int32),
    "transposed": lambda values: values.t(),
    "one row for all": lambda values: values[:1].expand_as(values),
    "a part": lambda values: values[:-1],
}
PARAMETERS = ("embedding.weight", "head.weight", "square.weight", "square.bias", "norm.weight")
BUFFERS = ("table", "_k_scale")


def set_tensor(network: nn.Module, name: str, values: torch.Tensor, *, in_place: bool) -> None:
    """New values of a parameter or buffer: into its memory, or in memory of their own."""
    owner_name, _, attribute = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if in_place and values.dtype == getattr(owner, attribute).dtype:
        getattr(owner, attribute).data.copy_(values.clone())
    elif name in BUFFERS:
        owner._buffers[attribute] = values
    else:
        owner._parameters[attribute] = nn.Parameter(values, requires_grad=False)


def synced_worker(tied: bool) -> tuple[Network, Callable[[], list[str]]]:
    """A network that was synced, and what a proof of it finds to differ."""
    network, worker = Network(tied), WeightsWorker()
    worker.model_runner = SimpleNamespace(model=network)
    worker.vllm_config = SimpleNamespace(additional_config={})
    shapes = {name: tuple(values.shape) for name, values in network.named_parameters()}
    layout, problems = worker.weights_learn(
        {name: list(shape) for name, shape in shapes.items()}, "float32"
    )
    assert problems == []
    tensors = sent(shapes, 3)
    # A zero, whose sign is one of the poisons.
    for tensor in tensors.values():
        tensor.view(-1)[-1] = 0.0
    for name, tensor in tensors.items():
        worker.weights_load(name, tensor)

    def differing() -> list[str]:
        wanted = {
            name: expected_prints(values, layout[name], 5) for name, values in tensors.items()
        }
        return differing_names(wanted, worker.weights_prints(5))

    return network, differing


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("poison", [*COPIES, *VIEWS])
@pytest.mark.parametrize("name", [*PARAMETERS, *BUFFERS])
def test_every_poison_of_every_tensor_is_named(name: str, poison: str, tied: bool) -> None:
    for in_place in (True, False) if poison in COPIES else (False,):
        network, differing = synced_worker(tied)
        assert differing() == []
        before = network.get_parameter(name) if name in PARAMETERS else network.get_buffer(name)
        try:
            values = {**COPIES, **VIEWS}[poison](before.detach())
        except IndexError:  # a number has no part
            return
        is_same = values.dtype == before.dtype and values.shape == before.shape
        is_same = is_same and torch.equal(
            values.contiguous().view(torch.int32), before.detach().contiguous().view(torch.int32)
        )
        if not is_same:
            set_tensor(network, name, values, in_place=in_place)
            assert differing() != [], in_place


@pytest.mark.parametrize("tied", [True, False])
def test_what_an_engine_gets_or_loses_beside_its_tensors_is_named(tied: bool) -> None:
    poisons: list[Callable[[Network], object]] = [
        lambda network: network.norm.register_parameter("bias", nn.Parameter(torch.zeros(4))),
        lambda network: network.register_buffer("other", torch.ones(1)),
        lambda network: setattr(network, "_k_scale_float", 2.0),
        lambda network: network._k_scale_cpu.mul_(1 + 2**-23),
        lambda network: setattr(network.norm, "eps", 1e-6),
        lambda network: setattr(network.square, "in_features", 3),
        lambda network: setattr(network, "scale", 2.0),
        lambda network: setattr(network, "is_neox_style", False),
        lambda network: setattr(network.impl, "scale", 0.25),
        lambda network: setattr(network.impl, "sliding_window", (7, 0)),
        lambda network: setattr(network.impl, "logits_soft_cap", 30.0),
        lambda network: network.impl.alibi_slopes.mul_(1 + 2**-23),
        lambda network: setattr(network.impl, "alibi_slopes", torch.tensor([0.5, 0.5])),
        lambda network: setattr(network.impl, "alibi_slopes", None),
        lambda network: setattr(network.config, "embedding_multiplier", 1.0),
        lambda network: setattr(network.square.weight, "data", network.square.weight.clone()),
        lambda network: delattr(network, "norm"),
        lambda network: setattr(network.square, "weight", None),
        lambda network: setattr(network.square, "weight", nn.Parameter(torch.zeros(0))),
        lambda network: setattr(network, "head", nn.Linear(4, 5, bias=False)),
    ]
    for poison in poisons:
        network, differing = synced_worker(tied)
        poison(network)
        assert differing() != []
    network, differing = synced_worker(tied)
    network.compiled = True
    assert differing() == []


def test_what_attention_computes_with_survives_vllm_s_sleep() -> None:
    """Its worker saves buffers, and all other memory comes back as anything."""
    network, differing = synced_worker(tied=False)
    slopes = network.impl.alibi_slopes
    saved = {name: buffer.clone() for name, buffer in network.named_buffers()}
    slopes.fill_(float("nan"))
    assert differing() != []
    for name, buffer in network.named_buffers():
        buffer.data.copy_(saved[name])
    assert slopes.tolist() == [0.5, 0.25]
    assert differing() == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_of_the_gpu_says_nothing_of_the_model(error: RuntimeError) -> None:
    def fail(_: Weights) -> None:
        raise error

    model = Fused([2], 2)
    with pytest.raises(type(error)):
        learn_layout(model, fail, model.shapes, torch.float32)
