"""The models, each adapting to the data's channels, size and classes: `model(shape, classes) -> module`."""

from collections import OrderedDict
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import nn

from fedcluster.errors import BadExperiment
from fedcluster.experiment import import_object
from fedcluster.models.layers import Crop, InputConv2d, Normalise, PoolSame
from fedcluster.rng import torch_seed

Shape = tuple[int, ...]


class Logistic(nn.Sequential):
    """Softmax regression: one linear layer with bias."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(prod(shape), classes)))


class MLP(nn.Sequential):
    """Two hidden layers of 200 with ReLU, as in McMahan et al. 2017 (199,210 parameters on MNIST)."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__(
            OrderedDict(
                flatten=nn.Flatten(),
                hidden1=nn.Linear(prod(shape), 200),
                relu1=nn.ReLU(),
                hidden2=nn.Linear(200, 200),
                relu2=nn.ReLU(),
                output=nn.Linear(200, classes),
            )
        )


class CNN(nn.Sequential):
    """Two 3x3 convolutions of 16 and 32 channels, each with ReLU and 2x2 max-pooling; a hidden layer of 128."""

    def __init__(self, shape: Shape, classes: int) -> None:
        channels, height, width = image(shape, "cnn", at_least=4)
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 16, 3, padding=1),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(16, 32, 3, padding=1),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                hidden=nn.Linear(32 * (height // 4) * (width // 4), 128),
                relu3=nn.ReLU(),
                output=nn.Linear(128, classes),
            )
        )


class AlexNet(nn.Sequential):
    """The small AlexNet of Zhang et al. 2017 ("Understanding deep learning requires rethinking generalization").

    Two blocks of convolution 5x5 (64 channels, same), max-pooling 3x3 with stride 2 (same) and local response
    normalisation, then layers of 384, 192 and the classes. Larger pictures are cropped to their middle 28x28.
    ReLU comes after pooling, which is the same function on a quarter of the numbers.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        channels, height, width = image(shape, "alexnet", at_least=1)
        crop = Crop(28)
        height, width = min(height, crop.size), min(width, crop.size)
        super().__init__(
            OrderedDict(
                crop=crop,
                conv1=InputConv2d(channels, 64, 5),
                pool1=PoolSame(),
                relu1=nn.ReLU(),
                normalise1=Normalise(),
                conv2=nn.Conv2d(64, 64, 5, padding=2),
                pool2=PoolSame(),
                relu2=nn.ReLU(),
                normalise2=Normalise(),
                flatten=nn.Flatten(),
                hidden1=nn.Linear(64 * -(-height // 4) * -(-width // 4), 384),
                relu3=nn.ReLU(),
                hidden2=nn.Linear(384, 192),
                relu4=nn.ReLU(),
                output=nn.Linear(192, classes),
            )
        )


def image(shape: Shape, model: str, at_least: int) -> Shape:
    if len(shape) != 3 or min(shape[1:]) < at_least:
        raise BadExperiment(
            f'model.name = "{model}" needs pictures of at least {at_least}x{at_least}, but a sample is '
            f"{list(shape)}: use mlp or logistic"
        )
    return shape


def build(name: Any, shape: Shape, classes: int, seed: int) -> nn.Module:
    """The module that `model.name` stands for, initialised from the seed; a module given as such is copied."""
    if isinstance(name, nn.Module):
        return deepcopy(name)
    match name:
        case "logistic":
            make: Any = Logistic
        case "mlp":
            make = MLP
        case "cnn":
            make = CNN
        case "alexnet":
            make = AlexNet
        case str():
            make = import_object(name, "shape", "classes")
        case _:
            make = name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "init"))
        try:
            module = make(shape, classes)
        except Exception as error:  # code of the user's may raise anything
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadExperiment(f"model.name: {name} fails when it is called with (shape, classes): {why}") from error
    if not isinstance(module, nn.Module):
        raise BadExperiment(f"model.name: {name} must return a torch.nn.Module, not {type(module).__name__}")
    return module
