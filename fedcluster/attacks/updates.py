"""Attacks on updates: malicious devices train honestly and send something else. W is the model that they received.

    sign_flip          W - scale (w_k - W)
    gaussian           W + noise, as long as `scale` times their own movement
    little_is_enough   mean - z deviation of the honest updates, by coordinate, which hides among them, and a movement
                       no longer than their longest; Baruch, Baruch, Goldberg: A Little Is Enough, NeurIPS 2019
    inner_product      W - scale mean(w_i - W) over the honest updates; Xie, Koyejo, Gupta: Fall of Empires, UAI 2019

In the last two all malicious devices of a cohort collude: they send the same. Other parts of a message (SCAFFOLD's
variates) are changed alike, with 0 in place of W.
"""

from collections.abc import Callable
from math import sqrt

import torch
from numpy.random import Generator
from torch import Tensor

from fedcluster.attacks.attack import Attack, Uploads, moved, movement
from fedcluster.experiment import Positive, Section
from fedcluster.state import Tensors

Streams = Callable[[int], Generator]


class SignFlip(Attack):
    class Options(Section):
        scale: Positive = 1.0

    def forge(self, uploads: Uploads, malicious: list[int], received: Tensors, rng: Streams) -> Uploads:
        return {k: moved(movement(uploads[k], received), received, -self.options.scale) for k in malicious}


class Gaussian(Attack):
    class Options(Section):
        scale: Positive = 3.0

    def forge(self, uploads: Uploads, malicious: list[int], received: Tensors, rng: Streams) -> Uploads:
        forged = {}
        for k in malicious:
            draw, noise = rng(k), Tensors()
            for name, part in movement(uploads[k], received).items():
                sigma = self.options.scale * float(part.double().norm()) / sqrt(max(1, part.numel()))
                drawn = torch.from_numpy(draw.standard_normal(tuple(part.shape)) * sigma)
                noise[name] = drawn.to(part.device, part.dtype)
            forged[k] = moved(noise, received)
        return forged


class LittleIsEnough(Attack):
    class Options(Section):
        z: Positive = 1.5

    def forge(self, uploads: Uploads, malicious: list[int], received: Tensors, rng: Streams) -> Uploads:
        honest = [message for device, message in uploads.items() if device not in malicious]
        if len(honest) < 2:  # nobody to hide among
            return super().forge(uploads, malicious, received, rng)
        moves = [movement(message, received) for message in honest]
        rows = {name: torch.stack([move[name] for move in moves]).double() for name in moves[0]}
        same = {name: self.hidden(row).to(moves[0][name]) for name, row in rows.items()}
        return dict.fromkeys(malicious, moved(same, received))

    def hidden(self, rows: Tensor) -> Tensor:
        """The movement to send, given those of honest devices [c, P]."""
        wanted: Tensor = rows.mean(0) - self.options.z * rows.std(0)
        longest, length = float(rows.norm(dim=1).max()), float(wanted.norm())
        return wanted * (longest / length) if length > longest else wanted


class InnerProduct(Attack):
    class Options(Section):
        scale: Positive = 1.0

    def forge(self, uploads: Uploads, malicious: list[int], received: Tensors, rng: Streams) -> Uploads:
        honest = [movement(message, received) for device, message in uploads.items() if device not in malicious]
        known = honest or [movement(uploads[device], received) for device in malicious]
        mean = {name: torch.stack([one[name] for one in known]).mean(0) for name in known[0]}
        return dict.fromkeys(malicious, moved(mean, received, -self.options.scale))
