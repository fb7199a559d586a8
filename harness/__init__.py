"""A real Kubernetes on this machine, for tests, the demo and manual work; README.md says how to use
it.

Why our own: the tests must meet a real API server and real kubelets on machines that have neither
Docker nor a registry.
"""
