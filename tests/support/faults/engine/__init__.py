"""Engines that do not start, or compute wrong numbers."""
