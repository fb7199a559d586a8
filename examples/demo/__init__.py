"""The demo: the main job of the project on a real Kubernetes, from `kubectl apply` to Succeeded.

Run by `make demo`; every step is what a user would type, printed before it is done.
"""
