"""The way to the API server and to the pods: requests, watches, caches and pulls."""
