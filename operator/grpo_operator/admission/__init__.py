"""Which waiting job may start: inventory, capacity, queue, verdicts. Pure, without a clock."""
