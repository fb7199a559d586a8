"""The contract of grpo-operator: the GRPOJob's types, the plan, the report and the metrics.

Everything else imports this package. It imports none of the others, no cluster client and no
training library. So a laptop, the operator's pod and a training pod load it in milliseconds.
"""
