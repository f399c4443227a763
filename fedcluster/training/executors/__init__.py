"""Executors: train a cohort in this process, in stacks, in several processes, or under torchrun."""
