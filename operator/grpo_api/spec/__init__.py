"""What a user writes into `spec`: a module for each section of a GRPOJob."""
