"""Reference strategies: where the frozen model comes from and where it lives."""
