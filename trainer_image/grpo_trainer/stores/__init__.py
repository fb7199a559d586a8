"""A run's folder on an object store: the client, the head that fences and points, and what is sent
and brought."""
