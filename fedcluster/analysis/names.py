"""What comparisons and reproductions can be asked for, by name. It imports nothing, so that the command line can check
and complete these names before torch is imported."""

DEFAULT_METHODS = ("fedavg", "fedcluster", "centralized")
METHODS = (*DEFAULT_METHODS, "fedcluster+", "minibatch")
RATES = ("paper", "equal", "tuned")
AXES = ("rounds", "aggregations", "updates", "bytes", "time")  # time: with simulated time only
PAPER_AXES = AXES[:-1]
FIGURES = ("fig2", "fig3", "fig4", "fig5", "fig6")
SCALES = ("quick", "standard", "paper")
