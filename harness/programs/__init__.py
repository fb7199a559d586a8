"""Programs that the cluster is made of: built, cached, started and ended."""
