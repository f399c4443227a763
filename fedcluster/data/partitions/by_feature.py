"""Partitions in which devices see other features: noise, rotation or a shift that depends on the device.

Every row belongs to one device (or one region), so the training set is changed once, row by row, and the partition says
which data set its rows index. Test data stay as they are. Bytes stay bytes: values are rounded and clipped.
"""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedcluster.data.dataset import Dataset
from fedcluster.data.partition import Partition
from fedcluster.data.partitions.by_size import shared_out
from fedcluster.data.partitions.request import Method, Request
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import NonNegative, Section
from fedcluster.rng import stream

BATCH = 1000  # pictures that are rotated at once


class FeatureSkewOptions(Section):
    """`sigma`: standard deviation of the last device's noise, in standard deviations of the feature; `degrees`: angle
    by which the last device's pictures are turned."""

    kind: Literal["noise", "rotation"] = "noise"
    sigma: NonNegative = 1.0
    degrees: Annotated[float, Field(ge=-360, le=360)] = 90.0


def feature_skew(request: Request) -> Partition:
    """The training set is shared out equally, and device k sees its samples changed by k / (n - 1) of the skew: with
    Gaussian noise (Li et al. 2022), or turned (rotated MNIST)."""
    request.refuse_sizes("feature_skew")
    options: FeatureSkewOptions = request.options
    dataset, devices = request.dataset, request.devices
    rows = len(dataset.y_train)
    partition = shared_out(np.diff(np.arange(devices + 1) * rows // devices), dataset, request.seed)
    x, scale = dataset.x_train.clone(), deviations(dataset)
    for k in range(devices):
        own = torch.from_numpy(partition.sample_indices(k))
        share = k / max(devices - 1, 1)
        if options.kind == "rotation":
            x[own] = rotated(x[own], share * options.degrees)
        else:
            noise = stream(request.seed, "feature_noise", device=k).standard_normal(x[own].shape, np.float32)
            x[own] = like(x[own] + share * options.sigma * scale * torch.from_numpy(noise), x)
    return replaced(partition, dataset, x)


def deviations(dataset: Dataset) -> Tensor:
    """The standard deviation of each feature of the training set, or of all pixels of pictures."""
    check_features(dataset)
    x: Tensor = dataset.x_train.float()
    return x.std(correction=0) if x.ndim == 4 else x.std(dim=0, correction=0)


def check_features(dataset: Dataset) -> None:
    if dataset.x_train.dtype not in (torch.uint8, torch.float32):
        raise BadData(f"{dataset.name} holds tokens, whose features cannot be skewed: use another fleet.partition")


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Pictures [N, channels, height, width] turned by an angle about their centre, bilinearly; outside is 0."""
    if x.ndim != 4:
        raise BadExperiment('kind = "rotation" rotates pictures, and the samples are not pictures: use kind = "noise"')
    if degrees == 0:
        return x
    angle = np.deg2rad(degrees)
    height, width = x.shape[2:]
    turn = torch.tensor(
        [
            [np.cos(angle), -np.sin(angle) * height / width, 0],
            [np.sin(angle) * width / height, np.cos(angle), 0],
        ],
        dtype=torch.float32,
    )
    parts = []
    for part in torch.split(x, BATCH):
        grid = F.affine_grid(turn.expand(len(part), 2, 3), list(part.shape), align_corners=False)
        parts.append(like(F.grid_sample(part.float(), grid, align_corners=False), x))
    return torch.cat(parts)


def like(values: Tensor, x: Tensor) -> Tensor:
    """Values of the type of x."""
    return values.round().clamp(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else values.to(x.dtype)


def replaced(partition: Partition, dataset: Dataset, x: Tensor) -> Partition:
    """The same partition over the data set with other training features."""
    return replace(partition, dataset=dataset.with_fields(x_train=x))


FEATURE_SKEW = Method(feature_skew, FeatureSkewOptions, samples="all")
