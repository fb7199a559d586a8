"""How a decision is carried out: the reconcile, its caches, and every request to the API server and
to the pods."""
