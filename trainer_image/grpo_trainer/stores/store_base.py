"""What users of a store share with its client, importable without the client's library."""

from grpo_api.text.units import MIB

PART_BYTES = 16 * MIB
"""Bytes of one request of a large object: a request that fails costs no more than these."""
REGION = "us-east-1"
"""What a store that has no regions takes, too."""
