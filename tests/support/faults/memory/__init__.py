"""Memory that does not suffice."""
