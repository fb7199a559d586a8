"""What a release publishes, built from this checkout and checked; nothing is pushed anywhere."""
