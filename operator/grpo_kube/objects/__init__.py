"""Plain values that describe a cluster: keys, resources, times, errors, a JSON reader. Pure."""
