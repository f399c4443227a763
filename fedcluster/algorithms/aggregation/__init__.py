"""Aggregators, which reduce the updates of a cohort to one message."""
