"""What tests of engines and the processes that they start have in common; imported without vLLM."""

FAULTS = (
    "skipped",
    "stale",
    "flipped in the sync",
    "flipped while sampling",
    "reloaded while sampling",
    "wrong version",
)
"""What engine_faults.py lets happen: to one weight's sync, or between the proof and the use of
completions."""
SKIPPED, FLIPPED, FLIPPED_LATER, OTHER_BUFFER, WRONG_VERSION = (
    "skipped",
    "flipped",
    "flipped-later",
    "other-buffer",
    "wrong-version",
)
POD_FAULTS = (SKIPPED, FLIPPED, FLIPPED_LATER, OTHER_BUFFER, WRONG_VERSION)
"""What faulty_engine.py lets happen in an engine's pod that survives it, and its trainer must
find."""
DIES, DIES_RECEIVING, STOPS, STOPS_LATER = "dies", "dies-receiving", "stops", "stops-later"
"""The ends of its process: SIGKILL to all of it at a request or amid a sync; SIGTERM, as the
kubelet sends it, at a request, or once it has answered and is to be proven again."""
GREEDY_PROMPTS = [[7, 30, 12], [3, 9, 27, 81, 5, 40], [60]]
GREEDY_LENGTH = 24
"""What engine_tokens.py completes, and how far."""
