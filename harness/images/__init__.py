"""Container images without a Docker daemon."""
