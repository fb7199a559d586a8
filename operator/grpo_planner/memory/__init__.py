"""The memory model: bytes per GPU and per host, for each phase of a GRPO step.

Pure arithmetic over a Shape and a Setup; docs/internals/memory-model.md has formulas, accuracy and
what is assumed.
"""
