"""What writes the generated files, one renderer per kind; `python -m grpo_codegen` writes or checks
them.

A tool of the repository: no other package imports it, and neither the wheel nor an image contains
it.
"""
