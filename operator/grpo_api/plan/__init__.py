"""What the planner hands to the operator and to the pods: the training plan, and what a plan
learned from runs."""
