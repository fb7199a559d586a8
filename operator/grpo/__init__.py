"""What Python programs and notebooks import."""
