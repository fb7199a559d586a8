"""Counts the memory of training processes, kernel by kernel, beside the planner's numbers."""
