"""Which plain values describe a cluster: keys, resources, times, errors and a reader of JSON.
Pure."""
