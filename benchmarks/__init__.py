"""Timings against what a user would otherwise call."""
