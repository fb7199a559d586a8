"""What the operator writes into `status`: phase, conditions, attempts and the use of GPUs."""
