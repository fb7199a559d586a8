"""What tests of engines and the processes that they start have in common; imported without vLLM."""

FAULTS = (
    "skipped",
    "stale",
    "flipped in the sync",
    "flipped while sampling",
    "reloaded while sampling",
    "wrong version",
)
"""What engine_faults.py lets happen: to one weight's sync, or between the proof and the use of completions."""
