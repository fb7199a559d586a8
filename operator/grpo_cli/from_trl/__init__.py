"""Reads a TRL GRPO script, without running it, or a configuration of `trl grpo`, and makes the
GRPOJob that trains the same. Pure: no file is opened here.
"""
