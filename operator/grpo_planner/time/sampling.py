"""Seconds of sampling: a batch of completions that thins out, by transformers' generate or vLLM.

Decoding reads weights and caches for each token of the batch. Its completions end one by one
(lengths.py). So most tokens are decoded by full batches, and the longest completions nearly alone.
With transformers' generate, finished ones stay in the batch until the longest has ended. An engine
lets them go and takes waiting ones in. All results are seconds.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..hardware.products import Product
from ..memory import engine as terms
from ..memory.setup import Setup
from ..model.shapes import Shape
from .constants import FITTED, Constants
from .lengths import Batch, batches, longest
from .training import GATHER_SECONDS, GIGA, expert_seconds, pass_seconds, reached_flops

MEMORY_EFFICIENCY = 0.6
"""Share of the memory bandwidth that decoding of transformers' generate reaches (assumed)."""
LAUNCH_SECONDS = 0.9e-3
"""Launch cost of one layer's kernels in one decoding step of transformers' generate."""
EAGER_LAYER_SECONDS = 0.25e-3
"""Launch cost of one dense layer's kernels in an engine without CUDA graphs (assumed; verl's 7B
rows of calibration.yaml)."""
EAGER_EXPERTS = 3.0
"""By how much more of them a layer of experts has, with routing and sorting (assumed; verl's 30B
rows)."""
ADAPTER_LAUNCHES = 7.0
"""By how much more an engine without CUDA graphs launches that adds an adapter to each product
itself (assumed; verl's LoRA runs of calibration.yaml). The trainer sends merged weights instead."""
REDUCE_SECONDS = 20e-6
"""Latency of one sum over the GPUs of an engine on one node, of which a layer has two (assumed)."""
WORDS = 1e5
"""Words of the vocabulary that Constants.sampling_seconds was fitted for."""


class EngineOverheads(NamedTuple):
    """What a published engine may take longer with than a planned one."""

    launches: float = 1.0
    """How many times as much it launches per layer where it has no CUDA graphs."""
    reduce_seconds: float = REDUCE_SECONDS
    """Latency of one sum over its GPUs."""


PLANNED_ENGINE = EngineOverheads()
SEVERAL_NODES = EngineOverheads(reduce_seconds=GATHER_SECONDS[True])


def decoded_parameters(shape: Shape, sequences: float) -> float:
    """Parameters that decoding one token of each sequence reads: of the experts, all that any token
    is sent to.

    With even routing a sequence misses an expert with probability 1 - k/E, and all of them with its
    power.
    """
    if not shape.experts:
        return shape.parameters
    missed: float = (1 - shape.active_experts / shape.experts) ** sequences
    return shape.parameters - shape.layers * shape.experts * missed * shape.expert_matrices


def generation_seconds(
    shape: Shape, setup: Setup, hardware: Product, calls: float, constants: Constants = FITTED
) -> float:
    """`calls` calls of generate, or as many fillings of the setup's engine; `hardware` samples."""
    sampler_seconds = engine_seconds if setup.engine else transformers_seconds
    return sampler_seconds(shape, setup, hardware, calls, constants)


def transformers_seconds(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    calls: float,
    constants: Constants = FITTED,
    *,
    smallest: int | None = None,
) -> float:
    """`calls` calls of generate: the prompts' pass; then each token reads weights and moves the
    cache, or waits for launches, until the longest completion has ended.

    DynamicCache concatenates keys and values for every token, so the cache is read once and copied
    twice. Where several heads share a key, attention writes and reads it once more for each of them
    (repeat_kv). Both counted on meta tensors, transformers 5.23.

    With `smallest` it is a lower bound for as many completions in batches of any size from that to
    the setup's: the longest of fewer is shorter, and their caches take less, but a call that is
    shared by fewer costs each of them more. For prefill and tokens per completion fall with the
    size, as a pass has a fixed part, and the longest of n is concave in n and 0 for n = 0.
    """
    sequences = setup.generation_batch
    mean, limit, runaway = setup.mean_completion, setup.completion, constants.runaway
    tokens = longest(mean, limit, runaway, sequences)
    least = sequences if smallest is None else smallest
    cached_tokens = longest(mean, limit, runaway, least)
    prompt = setup.padded_prompt
    mean_cached_tokens = (prompt + cached_tokens / 2) * (cached_tokens / tokens)
    cache = sequences * mean_cached_tokens * 2 * shape.layers * shape.key_value * setup.weight_bytes
    repeats = shape.heads // shape.kv_heads
    moves = 3 + (2 * repeats if repeats > 1 else 0)
    traffic = decoded_parameters(shape, least) * setup.compute_bytes + moves * cache
    bytes_per_second = hardware.bandwidth * GIGA * MEMORY_EFFICIENCY
    token = max(traffic / bytes_per_second, shape.layers * LAUNCH_SECONDS)
    prefill = pass_seconds(shape, hardware, sequences * prompt, prompt, constants)
    return calls * (prefill + tokens * token)


def engine_seconds(
    shape: Shape,
    setup: Setup,
    hardware: Product,
    calls: float,
    constants: Constants,
    *,
    overheads: EngineOverheads = PLANNED_ENGINE,
) -> float:
    """`calls` times as many completions as an engine samples at a time.

    As one ends the next begins, so all but the last as many are decoded by a full batch, and those
    thin out. But the longest of all may be any of them: no engine is faster than one that samples
    all at a time.
    """
    engine = terms.engine_of(setup)
    at_once = terms.sequences(setup)
    mean, limit = setup.mean_completion, setup.completion
    prompt = setup.mean_prompt
    prompts = pass_seconds(shape, hardware, at_once * prompt, prompt, constants)
    prefill = prompts / engine.tensor_parallel
    token = EngineToken(shape, setup, hardware, constants, overheads)
    generations = min(calls, engine.syncs)
    decoding = token.seconds_of(batches(mean, limit, constants.runaway, at_once))
    refills = calls / generations - 1
    if refills:
        completions = at_once * (1 + refills)
        at_least = token.seconds_of(batches(mean, limit, constants.runaway, completions))
        refilled = decoding + refills * mean * token.seconds(at_once, mean)
        decoding = max(refilled, at_least)
    return calls * prefill + generations * decoding


class EngineToken:
    """One token of all sequences of an engine: `max(read, compute)`, and what depends on neither.

    Read are the weights and the caches. All that does not depend on the sequences is worked out
    once: a generation asks for many batches.
    """

    def __init__(
        self,
        shape: Shape,
        setup: Setup,
        hardware: Product,
        constants: Constants,
        overheads: EngineOverheads = PLANNED_ENGINE,
    ) -> None:
        """An engine's token; arguments as of the step's time."""
        engine = terms.engine_of(setup)
        gpus = engine.tensor_parallel
        self._shape = shape
        self._has_experts = shape.experts > 0
        self._prompt = setup.mean_prompt
        self._weights = terms.weights(shape, setup)
        self._expert_bytes = setup.compute_bytes / gpus
        self._token_bytes = terms.token_bytes(shape, setup)
        self._bandwidth = hardware.bandwidth * GIGA * constants.read_share
        products = 2 * shape.active_parameters / reached_flops(hardware, constants)
        self._computed = (products + expert_seconds(shape, hardware, 1, constants)) / gpus
        layer = overheads.launches * EAGER_LAYER_SECONDS
        if shape.experts:
            layer *= EAGER_EXPERTS
        self._launched = 0.0 if engine.graphs else shape.layers * layer
        reduced = 2 * shape.layers * overheads.reduce_seconds if gpus > 1 else 0.0
        self._fixed = reduced + constants.token_seconds
        self._sampled = constants.sampling_seconds * shape.vocab / WORDS

    def seconds(self, sequences: float, position: float) -> float:
        """Seconds of a token of `sequences` that have `position` tokens of their completions."""
        return self.seconds_of([Batch(1.0, sequences, position)])

    def seconds_of(self, batches: Iterable[Batch]) -> float:
        """Seconds of all tokens of batches."""
        prompt, token_bytes, bandwidth = self._prompt, self._token_bytes, self._bandwidth
        computed, fixed, sampled = self._computed, self._fixed, self._sampled
        seconds, weights = 0.0, self._weights
        for tokens, sequences, position in batches:
            if self._has_experts:
                unread = self._shape.parameters - decoded_parameters(self._shape, sequences)
                weights = self._weights - unread * self._expert_bytes
            read_seconds = (weights + sequences * (prompt + position) * token_bytes) / bandwidth
            longest_part = max(read_seconds, computed * sequences, self._launched)
            seconds += tokens * (longest_part + fixed + sampled * sequences)
        return seconds
