"""Aggregation: how the updates of a cohort become one."""
