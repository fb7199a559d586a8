"""Follows a Python script without running it: what its names, objects and calls are.

`values` says what an expression can be. `heap` keeps what a script can change, for each way through
a condition. `objects` reads and changes fields and items, and `functions` has those of Python's own
that scripts use for settings. `evaluator` follows expressions, and `statements` all the rest.
"""
