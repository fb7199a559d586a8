"""Runs a job's trainer as processes of this machine."""
