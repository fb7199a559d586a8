"""What a run reports of itself: steps, phases, samples, progress and metrics."""
