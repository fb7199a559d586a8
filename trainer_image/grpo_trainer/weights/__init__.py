"""Loading weights, and proving that all ranks have the same ones."""
