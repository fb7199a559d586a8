"""Hands an exported model out of its volume: what runs in the short-lived pod of `grpo export`."""
