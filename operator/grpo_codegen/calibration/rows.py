"""A published run, and what the time model says of it.

The file calibration.yaml has one row for each run: what ran, on what, and how long the completions
were. A row has the published seconds of the whole step or of parts of it. The same functions as for
a plan predict them. What a publication leaves out is assumed, and each source says what.

Published frameworks pack sequences without padding, and split models in ways that this product
does not. So a row trains on the mean length, and its communication is that of the parameters which
one GPU has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple

from grpo_api.text.base import Model
from grpo_planner.hardware.products import Product, lookup_product, usable_bytes
from grpo_planner.memory import engine as terms
from grpo_planner.memory.setup import Engine, Setup
from grpo_planner.model.catalogue import lookup_shape
from grpo_planner.model.shapes import Shape
from grpo_planner.tables import read_data
from grpo_planner.time.constants import Constants
from grpo_planner.time.measured_runs import Part, RunRow
from grpo_planner.time.sampling import (
    ADAPTER_LAUNCHES,
    PLANNED_ENGINE,
    SEVERAL_NODES,
    EngineOverheads,
    EngineToken,
    engine_seconds,
)
from grpo_planner.time.step_time import link_bytes_per_second, sending_seconds
from grpo_planner.time.training import (
    GATHER_SECONDS,
    communication_seconds,
    compute_seconds,
    micro_batch_seconds,
)

NODE = 8
"""GPUs of a node (assumed)."""
ENGINE_SHARE = 0.6
"""Share of a GPU that a published engine takes of its trainer (verl's own; assumed of others)."""
MOST_SEQUENCES = 1024
"""Completions that an engine samples at a time at most (vLLM's own; verl's)."""


class Source(Model):
    """Where numbers were published."""

    address: str
    date: str
    framework: str
    assumed: str
    """What the publication leaves out, as the rows take it."""


class Row(RunRow):
    """A published run; `source` is the key of its Source."""

    adapter: bool = False
    """Whether each matrix of the adapter is gathered alone, and added to its product by the engine:
    verl's LoRA without CUDA graphs."""

    @property
    def key(self) -> str:
        """What is left out at a time: one source's runs of one model."""
        return f"{self.source} {self.model.partition('/')[2]}"

    @cached_property
    def shape(self) -> Shape:
        """The model's shape."""
        shape = lookup_shape(self.model)
        if shape is None:
            raise ValueError(f"{self.model} is not in the catalogue")
        return shape

    @cached_property
    def hardware(self) -> Product:
        """The GPU."""
        return lookup_product(self.gpu)

    @cached_property
    def nodes(self) -> int:
        """Nodes of the run."""
        return ceil(self.gpus / NODE)

    @property
    def units(self) -> int:
        """Groups of a layer's weights that are gathered and launched one by one."""
        if not self.adapter:
            return 1
        return 1 + 2 * sum(linear.copies for linear in self.shape.linears)

    @property
    def overheads(self) -> EngineOverheads:
        """What its engine takes longer with than a planned one."""
        if self.adapter:
            return EngineOverheads(launches=ADAPTER_LAUNCHES)
        return SEVERAL_NODES if self.tensor_parallel > NODE else PLANNED_ENGINE

    @cached_property
    def setup(self) -> Setup:
        """One update as the time model sees it."""
        share = max(1, self.sequences // self.gpus // self.updates)
        most = max(1, self.pass_tokens // (self.prompt + self.completion))
        micro_batch = max(size for size in range(1, min(share, most) + 1) if share % size == 0)
        length = self.prompt + self.limit
        return Setup(
            precision="bfloat16",
            prompt=self.prompt,
            completion=self.limit,
            expected=self.completion,
            micro_batch=micro_batch,
            accumulation=share // micro_batch,
            generation_batch=max(1, self.sequences // self.gpus),
            world=self.gpus,
            zero=self.zero,
            lora_rank=16 if self.lora else 0,
            checkpointing=self.recompute,
            engine=Engine(
                kind="Colocated",
                length=length,
                tensor_parallel=self.tensor_parallel,
                graphs=self.graphs,
            ),
        )

    @cached_property
    def at_once(self) -> int:
        """Completions that one engine samples at a time: what its cache holds."""
        share = int(ENGINE_SHARE * usable_bytes(self.hardware.memory_mib))
        alone = terms.weights(self.shape, self.setup)
        per_completion = (self.prompt + self.completion) * terms.token_bytes(self.shape, self.setup)
        room = int(max(0.0, share - alone) // per_completion)
        return max(1, min(room, MOST_SEQUENCES, terms.sequences(self.setup)))


class Prediction(NamedTuple):
    """What the model says of a part of a row, beside what was published."""

    row: Row
    part: Part
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted by published."""
        return self.predicted / self.published


def predictions(row: Row, constants: Constants) -> Iterator[Prediction]:
    """The model's answer to each part that was published of a row."""
    for part, published in row.seconds.items():
        yield Prediction(row, part, published, seconds_of(row, part, constants))


def seconds_of(row: Row, part: Part, constants: Constants) -> float:
    """The model's seconds of a part of a row."""
    if part == "token":
        token = EngineToken(row.shape, row.setup, row.hardware, constants, row.overheads)
        return token.seconds(row.sequences, row.completion / 2)
    if part == "training":
        return _training(row, constants)
    if part == "scoring":
        return _scoring(row, constants)
    if part == "generation":
        return _generation(row, constants)
    link = link_bytes_per_second(row.hardware, row.nodes, row.gpus // row.nodes)
    sync = sending_seconds(row.shape, row.setup, row.hardware, link, constants)
    if part == "sync":
        return sync
    parts = _training(row, constants), _scoring(row, constants), _generation(row, constants)
    return sum(parts) + sync


def _training(row: Row, constants: Constants) -> float:
    """All updates of a step."""
    setup, shape = row.setup, row.shape
    length = row.prompt + row.completion
    computed = compute_seconds(
        shape, setup, row.hardware, length, constants, shared=row.split, units=row.units
    )
    link = link_bytes_per_second(row.hardware, row.nodes, row.gpus // row.nodes)
    latency = GATHER_SECONDS[row.nodes > 1]
    sent = communication_seconds(shape, setup, link, latency)
    return row.updates * (computed + sent / row.split)


def _scoring(row: Row, constants: Constants) -> float:
    """The passes without gradients."""
    setup = row.setup
    length = row.prompt + row.completion
    tokens = setup.micro_batch * length
    seconds_per_pass = micro_batch_seconds(
        row.shape, row.hardware, tokens, length, constants, shared=row.split, units=row.units
    )
    return row.scores * row.updates * setup.accumulation * seconds_per_pass


def _generation(row: Row, constants: Constants) -> float:
    """The completions of a step by all engines."""
    engine = row.setup.engine
    assert engine is not None, "every row has one"
    per_engine = row.setup.generation_batch * engine.tensor_parallel
    sized = replace(engine, most_sequences=row.at_once)
    setup = replace(row.setup, engine=sized)
    calls = max(1.0, per_engine / row.at_once)
    return engine_seconds(row.shape, setup, row.hardware, calls, constants, overheads=row.overheads)


@cache
def published_runs() -> tuple[Mapping[str, Source], tuple[Row, ...]]:
    """All sources by key, and all rows of calibration.yaml."""
    data = read_data(__package__, "calibration.yaml")
    sources = {key: Source(**about) for key, about in data["sources"].items()}
    rows = tuple(Row(**fields) for fields in data["runs"])
    return sources, rows
