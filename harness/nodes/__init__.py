"""Real kubelets in namespaces of this machine, and nodes that only pretend (kwok)."""
