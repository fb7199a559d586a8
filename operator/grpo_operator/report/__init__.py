"""What users are told of a job: status, conditions and events. Pure."""
