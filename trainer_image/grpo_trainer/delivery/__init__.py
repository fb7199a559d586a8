"""Hands an exported model out of its volume or store: what runs in the short-lived pod of `grpo
export`."""
