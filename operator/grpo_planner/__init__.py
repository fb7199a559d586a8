"""The planner: from a GRPOJob's spec and a GPU inventory to an ExecutionPlan, with numbers and reasons.

Pure: no cluster, no torch, no clock. Used by the operator before each attempt and by `grpo plan` on a laptop.
"""
