"""Commands that read the steps of a run, of the cluster or of anybody."""
