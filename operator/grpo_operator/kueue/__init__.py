"""What a GRPOJob says to Kueue by its Workload, and what Kueue's answer means. Pure."""
