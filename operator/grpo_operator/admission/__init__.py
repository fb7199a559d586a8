"""Which waiting job may start: inventory, capacity, the queue and its verdicts. Pure: no client, no
own clock."""
