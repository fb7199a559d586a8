"""What every room of the trainer stands on: errors, the clock, durable files and paths."""
