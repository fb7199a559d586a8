"""What writes the generated files, one renderer per kind; `python -m grpo_codegen` writes or checks them."""
