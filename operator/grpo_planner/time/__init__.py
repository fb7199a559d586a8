"""How long a step takes: compute, memory traffic, links and engines."""
