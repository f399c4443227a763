"""Analysis: comparisons, tuning, the theorem measured on a fleet, plots and the paper's figures."""
