"""What a training pod reports to the operator: progress, metrics, outcome, artifacts and traces."""
