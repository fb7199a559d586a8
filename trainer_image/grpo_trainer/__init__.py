"""What runs in the training pods: reads the plan, trains with TRL, reports and saves."""
