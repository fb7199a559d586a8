"""Loading weights, and proving that all ranks hold the same ones."""
