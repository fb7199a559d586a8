"""The demo: the main job of the project on a real Kubernetes, from `kubectl apply` to Succeeded.

Every step of `make demo` is what a user would type, printed before it is done.
"""
