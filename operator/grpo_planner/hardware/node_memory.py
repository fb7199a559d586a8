"""What a kubelet leaves to pods of a node's memory, for nodes that nobody can ask.

A cluster's nodes report it as `status.allocatable`. For GPUs that are only named, and for an
inventory file, it is reckoned from the memory that is built in: a plan that filled all of it would
have pods that no node takes.
"""

from grpo_api.text.units import GIB, MIB

RESERVED_SHARES = ((4, 0.25), (4, 0.20), (8, 0.10), (112, 0.06))
"""GKE's reservation, which takes more of a large node than EKS' and AKS' do: this share of so many
GiB, one after the other (GKE documentation, "Plan GKE Standard node sizes")."""
RESERVED_BEYOND = 0.02
"""The share of all that is beyond them."""
EVICTION_THRESHOLD = 100 * MIB
"""Free memory below which a kubelet evicts pods, by default."""


def allocatable_memory(built_in: int) -> int:
    """Bytes that pods may request on a node with so many bytes of memory."""
    remaining = float(built_in)
    reserved = float(EVICTION_THRESHOLD)
    for size_gib, share in RESERVED_SHARES:
        part = min(remaining, size_gib * GIB)
        reserved += share * part
        remaining -= part
    reserved += RESERVED_BEYOND * remaining
    return max(0, round(built_in - reserved))
