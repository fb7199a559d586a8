"""What a user gives to a command: manifests, models and checkpoints, read and checked."""
