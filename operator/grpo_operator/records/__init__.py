"""What the operator keeps of each object: typed records, names and labels. Pure."""
