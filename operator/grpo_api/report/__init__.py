"""What a training pod tells the operator: progress, metrics, outcome, artifacts and traces."""
