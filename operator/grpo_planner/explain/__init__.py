"""Why a plan is as it is, and what would let a job fit that does not."""
