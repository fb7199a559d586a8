"""The operator: a level-triggered controller that turns GRPOJobs into gangs of training pods and keeps them alive.

`handlers` and `watcher` put keys into `workqueue`; `reconcile` takes them out and asks the pure modules (`observe`,
`policies`, `status`, `manifests`, `admission`) what to do; `cluster` does it.
"""
