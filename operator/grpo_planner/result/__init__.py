"""The answer of the planner, and the words and numbers that it is written with."""
