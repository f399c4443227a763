"""The geometric median, RFA. Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE Transactions
on Signal Processing 2022.

    v = argmin sum_k p_k ||v - w_k||

by the smoothed Weiszfeld algorithm: v is a weighted mean of the updates with weights a_k, at first p_k, then

    a_k = p_k / max(smoothing, ||v - w_k||)        renormalised

until the weights change by less than a millionth of a millionth, 1000 times at most. Distances from v follow from those
between updates,

    ||v - w_k||^2 = sum_i a_i D_ki - 1/2 sum_ij a_i a_j D_ij,        D_ij = ||w_i - w_j||^2

so an iteration costs c^2 operations, whatever the size of the model. Distances are those of whole messages. Updates
whose weight has fallen below half of p_k are named.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcluster.algorithms.aggregation.krum import squared_distances
from fedcluster.algorithms.aggregation.robust import Notes, Robust, Updates
from fedcluster.experiment import Positive

ITERATIONS, TOLERANCE = 1000, 1e-12


class GeometricMedian(Robust):
    class Options(Robust.Options):
        smoothing: Positive = 1e-6

    def combine(self, updates: Updates) -> tuple[Tensor, Notes]:
        shares = np.array(updates.weights) / sum(updates.weights)
        a = weiszfeld(np.array(squared_distances(updates.rows)), shares, self.options.smoothing)
        times = a / shares
        notes = {row: f"weighs {times[row]:.2g} times its share" for row in range(len(updates)) if times[row] < 0.5}
        return Updates(updates.rows, a.tolist(), updates.devices).mean(), notes


def weiszfeld(squares: NDArray[Any], shares: NDArray[Any], smoothing: float) -> NDArray[Any]:
    """The weights a_k of the geometric median, given the squared distances between points and their shares p_k."""
    a = shares
    for _ in range(ITERATIONS):
        to_rows = (squares * a).sum(1)
        distances = np.sqrt(np.maximum(to_rows - (a * to_rows).sum() / 2, 0))
        before, a = a, shares / np.maximum(smoothing, distances)
        a = a / a.sum()
        if np.abs(a - before).max() < TOLERANCE:
            break
    return a
