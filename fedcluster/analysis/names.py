"""What comparisons and reproductions can be asked for, by name. The command line checks and completes these names
before torch is imported."""

from typing import Literal, get_args

Rates = Literal["paper", "equal", "tuned"]
Axis = Literal["rounds", "aggregations", "updates", "bytes", "time"]  # time: with simulated time only
PaperAxis = Literal["rounds", "aggregations", "updates", "bytes"]
Figure = Literal["fig2", "fig3", "fig4", "fig5", "fig6"]
Scale = Literal["quick", "standard", "paper"]

DEFAULT_METHODS = ("fedavg", "fedcluster", "centralized")
METHODS = (*DEFAULT_METHODS, "fedcluster+", "minibatch")
RATES: tuple[str, ...] = get_args(Rates)
AXES: tuple[str, ...] = get_args(Axis)
PAPER_AXES: tuple[str, ...] = get_args(PaperAxis)
FIGURES: tuple[str, ...] = get_args(Figure)
SCALES: tuple[str, ...] = get_args(Scale)
