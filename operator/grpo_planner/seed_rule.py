"""The rule of thumb that this planner replaces: over 20 B parameters shard, with ample memory clone, else an adapter.

Exists so that docs/planner-table.md can show where numbers and rule part, and why. Used by the table's generator.
"""

from typing import Literal

SHARD_ABOVE = 20_000_000_000
BYTES_PER_PARAMETER = 20
"""float32 weights, gradients and two Adam moments (16), and a float32 reference (4): what `ample` must hold."""


def seed_rule(parameters: int, gpu_bytes: int) -> Literal["Sharded", "Clone", "Adapter"]:
    """The reference strategy that the rule of thumb picks from model size and memory of one GPU in bytes."""
    if parameters > SHARD_ABOVE:
        return "Sharded"
    return "Clone" if parameters * BYTES_PER_PARAMETER <= gpu_bytes else "Adapter"
