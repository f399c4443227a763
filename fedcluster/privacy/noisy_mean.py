"""The aggregator of differential privacy: a clipped mean with a fixed denominator, and noise.

    W_new = W + (sum_k clip(w_k - W) + z C u) / m       u ~ N(0, I), or correlated over cycles (`bands`)

m is the cohort's expected size, so that nothing but one device's own movement depends on that device. A device that is
absent counts as one that did not move, and an empty cohort releases noise. As in `mean`, every term is rounded to a
multiple of 2^-40, the noise too: what is released is the exact sum of real movements and real Gaussian noise, rounded.
The noise covers what rounding adds to the sensitivity C / m. Without noise, and with clip = inf, this is the mean of
equal weights to the bit.

With `clip = "adaptive"` (Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping,
NeurIPS 2021) the cohort also releases how many of its devices moved by less than C, and

    C_new = C exp(-RATE (b - QUANTILE))       b = 1/2 + (sum_k (1{||d_k|| < C} - 1/2) + s N(0, 1)) / m

which takes SHARE of the budget: s = z / (2 sqrt(SHARE)), and the movements get noise z / sqrt(1 - SHARE).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedcluster.algorithms.aggregation.mean import GRID, Mean
from fedcluster.fleet.schedule import Cycle
from fedcluster.models.kernels.vectors import add_rounded
from fedcluster.privacy import bands
from fedcluster.privacy.on_device import clipped
from fedcluster.rng import stream
from fedcluster.state import Aggregate, State, Tensors

ROUNDING = 2.0**-39  # at most what rounding adds to the sensitivity, for a weight or a unit of length of the model
HISTORY, ADAPTIVE = "privacy.noise", "privacy.clip"  # names in the server's state
FIRST_CLIP, RATE, QUANTILE, SHARE = 0.1, 0.2, 0.5, 0.1  # of the adaptive clip; the first two are those of the paper
UNCLIPPED = 1 - 1e-4  # a movement of less than this share of C was not clipped: on the device it is rounded to float32


@dataclass(frozen=True)
class Noise:
    """z, the seed of the noise, and how often a cycle, (round, cluster), was released before."""

    multiplier: float
    seed: int
    repeats: Mapping[tuple[int, int], int]


class NoisyMean(Mean):
    """Of one cycle. `clip` is None where it adapts. `share` is the weight of a device, 1 / m."""

    def __init__(
        self, spec: Tensors, noise: Noise, clip: float | None, share: float, state: State, cycle: Cycle
    ) -> None:
        super().__init__(spec)
        self.noise, self.state, self.cycle = noise, state, cycle
        self.adaptive = clip is None
        self.clip = float(state.server[ADAPTIVE]) if clip is None else clip
        self.share = share
        self.origin = state.model.double()
        self.within = torch.zeros(1, dtype=torch.float64, device=state.model.device)  # sum_k (1{||d_k|| < C} - 1/2)

    def accumulate(self, message: Tensors, weight: float, device: int = 0) -> None:
        """Add a device's model, clipped again. All devices have the same weight."""
        w = message["model"]
        if self.adaptive:
            self.within += float((w.double() - self.origin).norm() < UNCLIPPED * self.clip) - 0.5
        super().accumulate({"model": clipped(w, self.origin, self.clip)}, self.share)

    def reduce(self, all_reduce: Callable[[Tensor], None]) -> None:
        super().reduce(all_reduce)
        all_reduce(self.within)

    def finish(self) -> Aggregate:
        total, model = self.sums["model"], self.state.model
        whole = (self.share + GRID - GRID) * self.cycle.expected  # 1, but for rounding
        if absent := whole - self.weight:
            add_rounded(total, model, absent, GRID)
        self.weight = whole
        kept: Tensors = {}
        if z := self.noise.multiplier:
            z = z / math.sqrt(1 - SHARE) if self.adaptive else z
            rounding = ROUNDING * (math.sqrt(model.numel()) + float(self.origin.norm()))
            unit, kept = self.unit_noise()
            scale = z * (self.clip * self.share + rounding)
            add_rounded(total, torch.from_numpy(unit).to(total.device), scale, GRID)
        if self.adaptive:
            kept |= {ADAPTIVE: torch.full_like(self.state.server[ADAPTIVE], self.next_clip())}
        mean = super().finish()
        assert mean is not None, "the weight is positive"
        return replace(mean, kept=kept)

    def unit_noise(self) -> tuple[bands.Floats, Tensors]:
        """u of this cycle, and what is kept for the next. A cycle that was released before begins a new sequence."""
        z = self.rng("privacy noise").standard_normal(self.state.model.numel())
        history = self.state.server.get(HISTORY)
        if history is None:
            return z, {}
        unit, after = bands.correlate(z, torch.zeros_like(history) if self.repeat else history)
        return unit, {HISTORY: after}

    def next_clip(self) -> float:
        noise = self.noise.multiplier / (2 * math.sqrt(SHARE)) * self.rng("privacy clip").standard_normal()
        share = 0.5 + (float(self.within) + noise) * self.share
        return float(np.float32(self.clip * math.exp(-RATE * (share - QUANTILE))))

    @property
    def repeat(self) -> int:
        return self.noise.repeats.get((self.cycle.round, self.cycle.cluster), 0)

    def rng(self, role: str) -> np.random.Generator:
        return stream(self.noise.seed, role, self.cycle.round, self.cycle.cycle, self.repeat)


def initial_server_state(bands_used: int, adaptive: bool, model: Tensor) -> Tensors:
    """What the server keeps from cycle to cycle, before the first."""
    kept: Tensors = {}
    if bands_used > 1:
        kept[HISTORY] = bands.first_history(bands_used, model.numel()).to(model.device)
    if adaptive:
        kept[ADAPTIVE] = torch.full((1,), FIRST_CLIP, dtype=torch.float32, device=model.device)
    return kept
