"""`grpo` (also `kubectl grpo`): plan, render, status and logs of GRPOJobs from a terminal."""
