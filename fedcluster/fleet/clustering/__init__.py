"""Clusterings: which devices take their turn together."""
