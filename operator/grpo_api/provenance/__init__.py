"""Where a model comes from: signed statements about its training, and how they are checked."""
