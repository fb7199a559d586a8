"""Who and where this rank is, how the ranks meet, and how they talk to each other."""
