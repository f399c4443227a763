"""The device's part: it clips its movement and, under local differential privacy, adds noise to it.

w_k  <-  W + d_k min(1, C / ||d_k||)      d_k = w_k - W
w_k  <-  w_k + N(0, (z C)^2)              under local differential privacy
"""

from hashlib import blake2b

import torch
from numpy.random import Generator
from torch import Tensor

from fedcluster.algorithms.transforms import UpdateTransform
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, Privacy
from fedcluster.rng import stream
from fedcluster.state import Tensors

CLIP = "clip"  # the name of the clip in a broadcast


class ClipOnDevice(UpdateTransform):
    """`secret` is the seed of the device's own noise, which in a federation nobody else knows. Noise depends on all
    that the device has received: the same request gets the same answer, and any other an independent one."""

    def __init__(self, section: Privacy, noise_multiplier: float, secret: int) -> None:
        self.clip = section.clip
        self.noise = noise_multiplier if section.mechanism == "local" else 0.0
        self.secret = secret

    def on_device(self, upload: Tensors, received: Tensors, rng: Generator) -> Tensors:
        if self.clip == "adaptive" and CLIP not in received:
            raise BadExperiment('privacy.clip = "adaptive", but the server has not sent the clip of this cycle')
        clip = float(received[CLIP]) if self.clip == "adaptive" else float(self.clip or 0)
        model = clipped(upload["model"], received["model"].double(), clip)
        if self.noise:
            own = stream(self.secret, f"local noise {rng.integers(2**63)} {digest(received)}")
            noise = torch.from_numpy(own.standard_normal(model.numel())).to(model.device)
            model = model.double().add_(noise, alpha=self.noise * clip)
        return upload | {"model": model.to(upload["model"].dtype)}


def adapts(experiment: Experiment) -> bool:
    """Whether the clip is sent with every broadcast, because it adapts."""
    return experiment.privacy is not None and experiment.privacy.clip == "adaptive"


def clipped(w: Tensor, origin: Tensor, clip: float) -> Tensor:
    """The model w if it is at most `clip` away from the origin; else, in float64, the model that is and lies between
    them."""
    moved = w.double().sub_(origin)
    norm = float(moved.norm())
    return w if norm <= clip else moved.mul_(clip / norm).add_(origin)


def digest(received: Tensors) -> str:
    total = blake2b(digest_size=16)
    for name, tensor in sorted(received.items()):
        total.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
