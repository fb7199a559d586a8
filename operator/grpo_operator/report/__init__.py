"""What users read about a job: status, conditions and events. Pure."""
