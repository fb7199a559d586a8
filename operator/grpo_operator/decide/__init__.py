"""What happens next to a job: start, restart, wait, end or clean up. Pure: an observation comes in,
a decision goes out."""
