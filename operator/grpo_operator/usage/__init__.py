"""What became of a job's GPUs: status.usage, by the rules of docs/explanation/usage.md. Pure: looks
come in,
records go out."""
