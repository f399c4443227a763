"""Trackers: what a run records, sent to the tools that people already look at."""
