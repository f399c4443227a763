"""Differential privacy for devices: clipping, noise, and what they spend. docs/privacy.md says what is protected."""
