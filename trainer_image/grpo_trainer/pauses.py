"""How long what is outside the pods is waited for, whatever it is: the hub and object stores have one measure.

Something that is away for a minute must not end a run of three days, and one that is away for hours must not hold its
GPUs.
"""

LONGEST_WAIT = 600.0
"""Seconds without getting any further, after which the attempt ends and its GPUs are given back."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two tries; each pause is twice the one before."""
POLL_SECONDS = 2.0
"""Seconds between two reports of progress during a wait."""
