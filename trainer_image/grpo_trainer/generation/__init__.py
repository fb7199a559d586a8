"""Completions from vLLM engines: their weights are kept the trainer's, and proven to be, before any completion is used.

Imported by vLLM's workers too, which need torch alone: nothing is imported here.
"""
