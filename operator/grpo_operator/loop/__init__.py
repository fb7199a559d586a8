"""How a decision is carried out: the reconcile, its caches, and all requests."""
