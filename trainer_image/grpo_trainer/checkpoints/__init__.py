"""Checkpoints on a shared volume: ownership, sealing, resuming, and the exported model."""
