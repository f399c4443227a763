"""Attacks: what malicious devices of a simulation do to their samples and to the updates that they send."""
