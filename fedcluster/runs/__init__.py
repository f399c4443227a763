"""What a run writes: its folder, checkpoints, metrics, ledger, progress and plots."""
