"""Finds the mistakes in a job that need no GPU to be found, before torch is imported.

It reports all of them at once, each with what to write instead.
"""
