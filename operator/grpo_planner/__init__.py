"""The planner: from a GRPOJob's spec and a GPU inventory to an ExecutionPlan, with numbers and reasons.

Pure: no cluster, no torch, no clock. Used by the operator before each attempt and by `grpo plan` on a laptop.
"""

from .hardware.inventory import Inventory, Node
from .plan import plan_job
from .result import Candidate, Fix, PlanReason, PlanResult, Rejection

__all__ = ["Candidate", "Fix", "Inventory", "Node", "PlanReason", "PlanResult", "Rejection", "plan_job"]
