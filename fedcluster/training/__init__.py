"""Training: the set-up of a run, Algorithm 1, the trust boundary, evaluation and the executors."""
