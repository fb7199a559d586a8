"""What happens next to a job. Pure: an observation comes in, a decision goes out."""
