"""What there is to run on: GPU products, the nodes that offer them, and pools of nodes with the
same GPU."""
