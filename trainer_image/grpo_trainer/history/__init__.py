"""A run's own history beside its checkpoints: rows of its steps, and samples of completions."""
