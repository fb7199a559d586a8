"""What a user may say about the pods, in core/v1's own words: environment, resources, volumes, init
containers.

Shapes and defaults are Kubernetes'. What the operator needs for itself is reserved. What goes
beyond the `restricted` pod security standard is rejected. Each rule gives its reason.
"""
