"""A training run from its plan to its last step: built, guarded, trained by TRL and exported."""
