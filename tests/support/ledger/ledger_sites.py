"""Where memory is taken, and whether that is the GPU's or the host's.

On a CPU everything is in one memory: `.to("cuda")` and `pin_memory` do nothing there. So the place
follows from the function that allocates (DeepSpeed 0.19.8) and from whether the optimizer is
offloaded. A function of DeepSpeed's that isn't listed fails a test: an upgrade that allocates
elsewhere is looked at before it is counted.
"""

from collections import Counter
from typing import Literal

Place = Literal["device", "host", "network"]
"""`network`: buffers of gloo, which on a GPU are NCCL's own (COMMUNICATOR)."""

WATCHED = ("deepspeed/runtime/", "deepspeed/comm/", "torch/optim/")
"""Parts of paths of files whose functions are sites; allocations of others belong to the site that
called them."""
SMALL = 4096
"""Bytes up to which an allocation is a scalar or a shape, wherever it is made."""
OTHER_THREAD = "a thread of gloo's"
LOADED = "modeling_utils.py:from_pretrained"
"""What is read on the host, and moved by one of MOVES."""
MOVES = {"engine.py:_configure_distributed_model", "trainer.py:_move_model_to_device"}
STEP = {"stage3.py:step", "stage_1_and_2.py:step", "adam.py:step"}
"""accelerate's backward runs DeepSpeed's step, which is a phase of its own in the plan."""

COPY = "staged_collectives.py:copied"
"""What gloo works on."""
HOST = {
    LOADED,
    "checkpoint_files.py:_file",  # mapped into memory
    # the CPU's random state, of every layer
    "checkpoint.py:_checkpoint_without_reentrant_generator",
    "rank_ledgers.py:copied_to_the_host",
    "utils.py:clone_tensors_for_torch_save",
}
"""Sites that are always on the host."""
OFFLOADED = {
    "adam.py:_init_group",
    "stage3.py:_create_fp32_partitions",
    # grad_partitions_flat_buffer; the bucket is aten::empty
    "stage3.py:_setup_for_real_optimizer aten::zeros",
    "stage3.py:initialize_optimizer_states",
    "stage_1_and_2.py:__init__ aten::full",  # weights on their way to the GPU
    "stage_1_and_2.py:__init__ aten::to",  # the float32 master
    "stage_1_and_2.py:__init__ aten::clone",  # the same where the weights are float32
    "stage_1_and_2.py:buffer_to_accumulate_to_in_cpu",
    "stage_1_and_2.py:initialize_optimizer_states",
}
"""Sites on the host when the optimizer is offloaded, and on the device otherwise."""
IN_TURN = "stage_1_and_2.py:__init__ aten::zeros"
"""ZeRO-2's temp_grad_buffer_for_cpu_offload, then temp_grad_buffer_for_gpu_offload, which one
function makes."""
DEVICE = {
    "coalesced_collectives.py:reduce_scatter_coalesced",
    "engine.py:backward",
    "engine.py:forward",
    "linear.py:backward",
    "linear.py:forward",
    "partition_parameters.py:_all_gather_dtype",
    "partition_parameters.py:_all_gather_sequential",
    "partition_parameters.py:_allgather_params_coalesced",
    "partition_parameters.py:_allgather_params_sequential",
    "partition_parameters.py:_partition_param",
    "partition_parameters.py:wait",
    "partition_parameters.py:wrapped_fn",
    "stage3.py:_constant_buffered_norm2",
    "stage3.py:_offload_grad_partition_at_boundary",
    "stage3.py:_prepare_fp32_grad_for_sub_group",
    "stage3.py:_setup_for_real_optimizer",
    "stage3.py:get_grad_norm_direct",
    "stage_1_and_2.py:__init__",
    "stage_1_and_2.py:allreduce_bucket",
    "stage_1_and_2.py:async_inplace_copy_grad_to_fp32_buffer_from_gpu",
    "stage_1_and_2.py:copy_grads_in_partition",
    "stage_1_and_2.py:flatten_dense_tensors_aligned",
    "stage_1_and_2.py:get_grad_norm_direct",
    "stage_1_and_2.py:reduce_independent_p_g_buckets_and_remove_grads",
    "stage_1_and_2.py:set_norm_for_param_grad_in_gpu",
    "stage_1_and_2.py:setup_buckets",
    "stage_1_and_2.py:step",
    "trainer.py:_move_model_to_device",
    "utils.py:defragment",
    "utils.py:get_lst_from_rank0",
}
"""Sites that are always on the device."""


def watched(file: str, name: str) -> bool:
    """Whether a function, `file.py:function`, is a site."""
    return name in {*HOST, *MOVES, COPY} or any(part in file for part in WATCHED)


class Table:
    """The place of each allocation of one run."""

    def __init__(self, *, offload: bool) -> None:
        self._offload = offload
        self._seen = 0
        self.unknown: Counter[str] = Counter()
        """Bytes of sites that nobody has looked at; they count as the device's."""

    def place(self, sites: tuple[str, ...], operator: str, size: int) -> Place:
        """Where an allocation is.

        Args:
            sites: watched functions that run, from the outermost on; outside of all it is the
                model's, on the device.
            operator: the outermost torch operator below the innermost of them, such as
                `aten::zeros`.
            size: bytes.
        """
        site = sites[-1] if sites else ""
        exact = f"{site} {operator}"
        if site in (OTHER_THREAD, COPY) or site.startswith("torch.py:"):
            return "network"
        if site in HOST:
            return "host"
        if self._offload and exact == IN_TURN and size > SMALL:
            self._seen += 1
            return "host" if self._seen % 2 else "device"
        if {site, exact} & OFFLOADED:
            return "host" if self._offload else "device"
        if site and site not in DEVICE and size > SMALL:
            self.unknown[exact] += size
        return "device"
