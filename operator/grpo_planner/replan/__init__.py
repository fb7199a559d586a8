"""What follows from a plan that has run: measured memory, and a plan after out-of-memory."""
