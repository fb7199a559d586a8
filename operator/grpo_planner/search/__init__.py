"""The search: ways of running a job, what each takes and how long, and which of them is best."""
