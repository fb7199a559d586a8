"""The trainer's side of completions from vLLM engines, in this process or in pods of their own.

An engine's weights are kept the trainer's, and proven to be, before any completion is used. What
runs in an engine's pod is in engine_pod/.
"""
