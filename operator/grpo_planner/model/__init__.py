"""The model to train: the widths of its decoder, where they are known from, and what follows from
them."""
