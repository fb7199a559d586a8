"""Training processes without a cluster, for tests and benchmarks."""
