"""The experiment trackers of spec.tracking: each runs in a process of its own beside rank 0, so
that nothing of it can touch training."""
