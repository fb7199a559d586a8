"""What runs in an engine's pod, and the protocol between it and the trainer.

vLLM's workers import this package too, and they need torch alone: nothing is imported here.
"""
