"""Published and measured runs, and the fit of the time model's constants to them."""
