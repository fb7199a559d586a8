"""The acceptance run from the repository: on this machine's GPU, and packed for a machine without a
network."""
