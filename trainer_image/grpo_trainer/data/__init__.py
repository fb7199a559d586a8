"""From the declared dataset to the prompts of a run."""
