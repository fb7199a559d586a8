"""The operator: a level-triggered controller that turns GRPOJobs into gangs of training pods and
keeps them alive.

`process` puts one process together. `loop` has the reconcile and all I/O: it asks the pure rooms
what to do, then does it. Pure rooms are admission, kueue, decide, pods, records, report, usage and
tracing.
"""
