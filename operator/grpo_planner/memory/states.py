"""Terms of the memory model that live through the whole run: weights, gradients, optimizer state,
reference, buffers.

Sources: ZeRO paper (Rajbhandari et al. 2020), DeepSpeed 0.19.8, TRL 1.16. Tests compare the ZeRO
rows with live engines on gloo ranks (tests/trainer/test_memory_ranks.py).

All results are bytes on one GPU.
"""

from ..model.shapes import Shape
from .setup import Setup
from .trained_tensors import (
    fullest_rank,
    fullest_step,
    largest_in_layer,
    largest_trained,
    persistent_elements,
    trained_matrices,
    trained_vectors,
)

MAX_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters."""
SUB_GROUP = 1_000_000_000
"""DeepSpeed's sub_group_size: parameters that one optimizer kernel handles at a time."""
SMALL_TENSOR = 4096
"""bitsandbytes' min_8bit_size: elements below which a tensor's moments stay in float32."""
BLOCK = 256
"""Elements that share one float32 scale in a moment of 8-bit AdamW (bitsandbytes)."""

PREFETCH = 0.9
"""Share of hidden**2 elements that ZeRO-3 gathers ahead (transformers' `auto` for
stage3_prefetch_bucket_size)."""
REFERENCE_PERSISTENCE = 100_000
"""The most elements of a parameter that a Sharded reference keeps whole: DeepSpeed's own
threshold."""
NORM_CHUNK = 250_000_000
"""Elements that ZeRO-3 copies to float64 at a time for a gradient's norm
(_constant_buffered_norm2)."""
PROOF_CHUNK = 1 << 24
"""Elements of the checkpoint that the trainer's proof has on the device at a time, beside a byte
each to compare."""


def trained_parameters(shape: Shape, setup: Setup) -> int:
    """Parameters with a gradient: the adapter's, or all."""
    if setup.has_lora:
        return shape.adapter_parameters(setup.lora_rank, setup.lora_targets)
    return shape.parameters


def trained_bytes(setup: Setup) -> int:
    """Bytes of one trained weight: PEFT keeps adapters in float32, DeepSpeed in the base's
    dtype."""
    keeps_float32 = setup.has_lora and not setup.zero
    return 4 if keeps_float32 else setup.weight_bytes


def weights(shape: Shape, setup: Setup) -> float:
    """parameters * bytes, and the adapter's; divided by the world under ZeRO-3."""
    policy = shape.parameters * setup.weight_bytes
    adapter = trained_parameters(shape, setup) * trained_bytes(setup) if setup.has_lora else 0
    partitions = setup.world if setup.zero == 3 else 1
    return (policy + adapter) / partitions


def offloaded_base(shape: Shape, setup: Setup) -> int:
    """Bytes of the frozen base that waits in host memory while the engine is awake."""
    if setup.engine is None or not setup.engine.offloads_base:
        return 0
    return shape.parameters * setup.weight_bytes


def optimizer_state(shape: Shape, setup: Setup) -> float:
    """AdamW's two moments, under ZeRO beside a float32 master and divided by the world.

    8 bytes per parameter in float32, 4 in pure bfloat16, in 8 bits about 2; ZeRO 12 / world;
    offloaded 0.
    """
    if setup.offload:
        return 0
    trained = trained_parameters(shape, setup)
    if setup.zero:
        return trained * 12 / setup.world
    if setup.eight_bit:
        return eight_bit_state(shape, setup)
    return trained * 2 * trained_bytes(setup)


def eight_bit_state(shape: Shape, setup: Setup) -> float:
    """8-bit AdamW's two moments, summed over the trained tensors.

    The input embedding, with the head where they are tied, keeps float32 moments: transformers'
    Trainer registers every nn.Embedding so. Experts, and what a declared size has beyond the
    shape's tensors, count as large matrices.
    """
    if setup.has_lora:
        rank = setup.lora_rank
        of_factors = 0
        for linear in shape.adapted_linears(setup.lora_targets):
            pair = moments(rank * linear.inputs) + moments(rank * linear.outputs)
            of_factors += linear.copies * pair
        return of_factors
    linears = () if shape.experts else shape.linears
    tensors = [(shape.layers * linear.copies, linear.inputs * linear.outputs) for linear in linears]
    tensors += shape.vectors
    # Small tensors are rounded one by one. The rest is taken as large: 2 bytes and a share of a
    # block's two scales.
    tensor_elements = sum(count * elements for count, elements in tensors)
    rest = shape.parameters - shape.head - tensor_elements
    of_head = 8 * shape.head
    of_tensors = sum(count * moments(elements) for count, elements in tensors)
    of_rest = (2 + 8 / BLOCK) * rest
    return of_head + of_tensors + of_rest


def moments(elements: int) -> int:
    """Bytes of two 8-bit moments of one tensor, a byte per element and a scale per block; small
    ones are float32."""
    if elements < SMALL_TENSOR:
        return 8 * elements
    blocks = -(-elements // BLOCK)
    return 2 * elements + 8 * blocks


def reference_weights(shape: Shape, setup: Setup) -> float:
    """Clone: a whole copy in the policy's dtype. Sharded: its partition. Adapter, Offload and None:
    nothing stays.

    An engine of ZeRO-3's that never trains has DeepSpeed's own limit for what it keeps whole: TRL
    names the policy's in a form that DeepSpeed does not read (prepare_deepspeed).
    """
    whole = shape.parameters * setup.weight_bytes
    if setup.reference == "Clone":
        return whole
    persistent = persistent_elements(shape, 0, limit=REFERENCE_PERSISTENCE)
    gathered = persistent * setup.weight_bytes if setup.zero == 3 else 0
    if setup.reference == "Sharded":
        return whole / setup.world + gathered
    return gathered if setup.reference == "Offload" else 0


def visiting_reference(shape: Shape, setup: Setup) -> float:
    """Bytes of an offloaded reference during its pass: all of it, or under ZeRO-3 the gathered
    modules."""
    if setup.reference != "Offload":
        return 0
    if setup.zero == 3:
        return live_parameters(shape, setup)
    return shape.parameters * setup.weight_bytes


def gradients(shape: Shape, setup: Setup) -> float:
    """Gradients that wait for the next micro-batch, or for the optimizer.

    All of them without ZeRO; under ZeRO-2 those of this rank's partition (partition_gradients).
    ZeRO-3 keeps one flat partition for good (permanent_gradients); offloaded ones are in host
    memory.
    """
    trained = trained_parameters(shape, setup)
    if not setup.is_partitioned:
        return trained * trained_bytes(setup)
    if setup.zero == 3 or setup.offload:
        return 0
    return partition_gradients(shape, setup, 0)


def partition_gradients(shape: Shape, setup: Setup, least: int) -> float:
    """Bytes of ZeRO-2's gradients of tensors with `least` elements or more, on the rank with the
    largest share.

    A tensor that lies across partitions is whole on each of their ranks (copy_grads_in_partition).
    """
    matrices = trained_matrices(shape, setup.lora_rank, setup.lora_targets)
    of_matrices = fullest_rank(matrices, setup.weight_bytes, setup.world, int, least)
    vectors = 0 if least else trained_vectors(shape, setup.lora_rank)
    return of_matrices + setup.weight_bytes * vectors


def kept_gradients(shape: Shape, setup: Setup) -> float:
    """Offloaded by ZeRO-2, gradients of this rank that stay on the GPU until a micro-batch before
    the last is over.

    Their copies on the host are added to (async_accumulate_grad_in_cpu_via_gpu), and they are
    dropped with all others at the end (zero_grad). Those that fit into a bucket are part of that,
    larger ones are not.
    """
    if setup.zero != 2 or not (setup.offload and setup.is_accumulating):
        return 0
    larger_than_bucket = shape.hidden**2 + 1
    return partition_gradients(shape, setup, larger_than_bucket)


def passing_gradients(shape: Shape, setup: Setup) -> float:
    """ZeRO-2's gradient of a layer that is larger than a bucket: held until the next comes, beside
    that."""
    largest = largest_in_layer(shape)
    if setup.zero != 2 or setup.has_lora or largest <= shape.hidden**2:
        return 0
    return setup.weight_bytes * largest


def permanent_gradients(shape: Shape, setup: Setup) -> float:
    """ZeRO-3's flat gradient partition, which is never freed (measured): bytes * parameters /
    world."""
    if setup.zero != 3 or setup.offload:
        return 0
    all_ranks = trained_parameters(shape, setup) * setup.weight_bytes
    return all_ranks / setup.world


def reduction_buckets(shape: Shape, setup: Setup) -> float:
    """What stays of buckets: ZeRO-3's of hidden**2 elements (transformers' `auto`), DDP's flat
    buckets.

    DDP keeps one more copy of all gradients, as gradient_as_bucket_view is off by default.
    """
    if setup.zero == 3:
        return shape.hidden**2 * setup.weight_bytes
    if setup.zero or setup.world == 1:
        return 0
    return trained_parameters(shape, setup) * trained_bytes(setup)


def passing_buckets(shape: Shape, setup: Setup) -> float:
    """ZeRO-2's two buckets of hidden**2 elements, which it makes for every backward pass
    (setup_buckets)."""
    if setup.zero != 2:
        return 0
    return 2 * shape.hidden**2 * setup.weight_bytes


def offload_buffer(shape: Shape, setup: Setup) -> float:
    """ZeRO-2's buffer on the GPU for what comes back from the host, as large as the largest trained
    tensor.

    `temp_grad_buffer_for_gpu_offload`; its pinned counterpart is among the host's terms.
    """
    if setup.zero != 2 or not setup.offload:
        return 0
    elements = largest_trained(shape, setup.lora_rank, setup.lora_targets)
    return setup.weight_bytes * elements


def live_parameters(shape: Shape, setup: Setup) -> float:
    """Parameters that ZeRO-3 keeps gathered while it computes: at most all, else
    MAX_LIVE_PARAMETERS and a module more.

    The module that is computing comes on top of the limit: DeepSpeed checks before it gathers the
    next.
    """
    if setup.zero != 3:
        return 0
    limit = MAX_LIVE_PARAMETERS + shape.largest_module
    elements = min(gathered_parameters(shape, setup), limit)
    return setup.weight_bytes * elements


def gathered_parameters(shape: Shape, setup: Setup) -> int:
    """Parameters of the whole policy, its adapter's among them."""
    adapter = trained_parameters(shape, setup) if setup.has_lora else 0
    return shape.parameters + adapter


def gathering_buffers(shape: Shape, setup: Setup) -> float:
    """Flat buffers that ZeRO-3 gathers several parameters into, beside what it copies out of them.

    All experts of a layer come together. Ahead of the computation it gathers the prefetch bucket
    and the parameter that fills it; where generation doesn't gather, nothing ahead (the trainer's
    trl_config.py).
    """
    if setup.zero != 3:
        return 0
    experts = shape.experts * shape.expert_matrices
    if not setup.gather:
        return setup.weight_bytes * experts
    ahead = PREFETCH * shape.hidden**2 + largest_in_layer(shape)
    return setup.weight_bytes * max(experts, ahead)


def persistent_parameters(shape: Shape, setup: Setup) -> float:
    """What ZeRO-3 keeps whole on every rank between uses: norms, biases, an adapter's small
    factors.

    A step frees them before its own buffers exist and gathers them again after (_post_step), so
    they count once.
    """
    if setup.zero != 3:
        return 0
    elements = persistent_elements(shape, setup.lora_rank, setup.lora_targets)
    return setup.weight_bytes * elements


def gradient_norm(shape: Shape, setup: Setup) -> float:
    """DeepSpeed's float64 copy of one gradient for its norm: of what this rank holds of the largest
    tensor, 8 bytes.

    get_norm_dtype is float64 wherever the device has it. ZeRO-3 holds a share of each tensor and
    copies NORM_CHUNK at a time; ZeRO-2's partition may lie within one tensor.
    """
    if not setup.zero:
        return 0
    largest = largest_trained(shape, setup.lora_rank, setup.lora_targets)
    if setup.zero == 3:
        share = largest / setup.world
        return 8 * min(share, NORM_CHUNK)
    partition = trained_parameters(shape, setup) / setup.world
    return 8 * min(largest, partition)


def step_buffers(shape: Shape, setup: Setup) -> float:
    """What ZeRO's optimizer step holds: gradients averaged, flattened, and copied to float32
    (measured).

    Under ZeRO-2 this rank's gradients, flat and in float32, or before them one gradient's norm, on
    the rank where that is most; under ZeRO-3, whose gradients are permanent, those of one
    sub-group, in place of what it otherwise keeps whole. Fused AdamW without ZeRO needs none.
    """
    if not setup.zero or setup.offload:
        return 0
    partition = trained_parameters(shape, setup) / setup.world
    # The flat copy is in the model's dtype; the optimizer works on float32, so narrow gradients are
    # copied once more.
    float32_copy = 4 if setup.weight_bytes == 2 else 0
    element_bytes = setup.weight_bytes + float32_copy
    if setup.zero == 3:
        sub_group = min(partition, SUB_GROUP)
        buffers = max(element_bytes * sub_group, gradient_norm(shape, setup))
        return max(0, buffers - persistent_parameters(shape, setup))
    matrices = trained_matrices(shape, setup.lora_rank, setup.lora_targets)
    vectors = setup.weight_bytes * trained_vectors(shape, setup.lora_rank)
    flat = element_bytes * partition
    return vectors + fullest_step(matrices, setup.weight_bytes, setup.world, flat)


def loading_bytes(shape: Shape, setup: Setup) -> float:
    """Before the optimizer exists: weights, the reference where it is first put, and what the proof
    compares at a time.

    An offloaded reference is wrapped on the GPU before it goes to the host, beside the policy.
    ZeRO-3 makes and fills a module whole, then has its partition beside it; partitions of an
    offloaded reference never stay on the GPU. ZeRO-2 copies all weights into one flat tensor, on
    the GPU where it has room for it.
    """
    whole = shape.parameters * setup.weight_bytes
    wraps_whole = setup.reference == "Offload" and setup.zero != 3
    wrapped = whole if wraps_whole else reference_weights(shape, setup)
    again = 0
    if setup.zero == 2:
        again = whole
    elif setup.zero == 3:
        again = 2 * setup.weight_bytes * shape.largest_module
    # The proof has a chunk of the checkpoint on the device, and a byte per element that says where
    # it differs.
    proof = PROOF_CHUNK * (setup.weight_bytes + 1)
    return weights(shape, setup) + wrapped + again + proof


def first_gradients(shape: Shape, setup: Setup) -> float:
    """ZeRO-3 makes AdamW's moments by a step on float32 zeros, a sub-group at a time; offloaded
    ones on the host."""
    if setup.zero != 3 or setup.offload:
        return 0
    partition = trained_parameters(shape, setup) / setup.world
    return 4 * min(partition, SUB_GROUP)


def static_bytes(shape: Shape, setup: Setup) -> float:
    """Bytes that stay allocated between the phases once the first step is over."""
    return (
        weights(shape, setup)
        + optimizer_state(shape, setup)
        + reference_weights(shape, setup)
        + reduction_buckets(shape, setup)
        + permanent_gradients(shape, setup)
        + persistent_parameters(shape, setup)
        + offload_buffer(shape, setup)
    )
