"""What a run tells of itself: steps, phases, samples, progress and metrics."""
