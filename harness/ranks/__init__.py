"""Training processes without a cluster, and what is measured in them; for tests and benchmarks."""
