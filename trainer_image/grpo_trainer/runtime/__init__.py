"""What every room of the trainer uses: errors, the clock, the plan, durable files and paths."""
