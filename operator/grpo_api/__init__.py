"""The contract of grpo-operator: the GRPOJob's types, the plan, the report and the metrics.

Everything else imports this package; it imports none of the others, no cluster client and no
training library, so that a laptop, the operator's pod and a training pod all load it in
milliseconds.
"""
