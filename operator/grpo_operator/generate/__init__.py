"""Renderers of the generated files, one module per kind of file; grpo_operator.codegen writes what they return."""
