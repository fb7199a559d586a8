"""A plugin of vLLM that keeps the weights of an engine on CPUs as they are on GPUs: plain tensors,
one per layer.

vLLM's CPU build repacks linear layers for its kernels and leaves an empty parameter behind, which
neither TRL's weight sync nor a proof can reach. vLLM calls the entry point in every process, before
the model is built.
"""

import vllm._custom_ops
import vllm.model_executor.layers.utils


def keep_weights_plain() -> None:
    """Turn off both kernels that want packed weights; the layers then use torch's own."""
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False
