"""Units of memory; a module of its own, since the types of quantities take pydantic to import."""

MIB, GIB = 2**20, 2**30
"""Bytes of one MiB and of one GiB."""
