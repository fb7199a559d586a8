"""What the operator keeps of each object of the cluster: typed records, the names and the labels.
Pure."""
