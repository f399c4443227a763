"""The models that `model.name` can name, each made for the data: `model(shape, outputs) -> module`, for samples of this
shape and as many outputs as there are classes, numbers or labels.

A model that has a parameter `vocabulary` is for token ids and is given their number; one that has a parameter `target`
is given the kind of targets.
"""

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedcluster.data.dataset import DataSpec
from fedcluster.errors import BadExperiment
from fedcluster.experiment import import_object
from fedcluster.models import pretrained
from fedcluster.models.layers import Crop, InputConv2d, Normalise, PoolSame
from fedcluster.rng import torch_seed

Shape = tuple[int, ...]


class Logistic(nn.Sequential):
    """One linear layer with bias: softmax regression for classes, linear regression for numbers."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(prod(shape), outputs)))


class MLP(nn.Sequential):
    """Two hidden layers of 200 with ReLU, as in McMahan et al. 2017 (199,210 parameters on MNIST)."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__(
            OrderedDict(
                flatten=nn.Flatten(),
                hidden1=nn.Linear(prod(shape), 200),
                relu1=nn.ReLU(),
                hidden2=nn.Linear(200, 200),
                relu2=nn.ReLU(),
                output=nn.Linear(200, outputs),
            )
        )


class CNN(nn.Sequential):
    """Two 3x3 convolutions of 16 and 32 channels, each with ReLU and 2x2 max-pooling; a hidden layer of 128."""

    def __init__(self, shape: Shape, outputs: int) -> None:
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
                output=nn.Linear(128, outputs),
            )
        )


class AlexNet(nn.Sequential):
    """The small AlexNet of Zhang et al. 2017 ("Understanding deep learning requires rethinking generalization").

    Two blocks of convolution 5x5 (64 channels, same), max-pooling 3x3 with stride 2 (same) and local response
    normalisation, then layers of 384, 192 and the outputs. Larger pictures are cropped to their middle 28x28.
    ReLU comes after pooling, which is the same function on a quarter of the numbers.
    """

    def __init__(self, shape: Shape, outputs: int) -> None:
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
                output=nn.Linear(192, outputs),
            )
        )


class LSTM(nn.Module):
    """LEAF's character model (Caldas et al. 2018): an embedding of 8, two LSTM layers of 256, a linear layer.

    For token targets it gives scores [N, S, vocabulary], one row for every position; for others, outputs from the last
    position, [N, outputs].
    """

    def __init__(self, shape: Shape, outputs: int, vocabulary: int, target: str) -> None:
        super().__init__()
        self.every_position = target == "token"
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.output = nn.Linear(256, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        outputs: Tensor = self.output(states if self.every_position else states[:, -1])
        return outputs


ZOO: dict[str, Callable[..., nn.Module]] = {
    "alexnet": AlexNet,
    "cnn": CNN,
    "mlp": MLP,
    "logistic": Logistic,
    "lstm": LSTM,
}


def image(shape: Shape, model: str, at_least: int) -> Shape:
    if len(shape) != 3 or min(shape[1:]) < at_least:
        raise BadExperiment(
            f'model.name = "{model}" needs pictures of at least {at_least}x{at_least}, but a sample is '
            f"{list(shape)}: use mlp or logistic"
        )
    return shape


EXTRA = ("vocabulary", "target")  # of the data, for models that have parameters of these names
LARGE = 28  # pixels on a side: pictures as large as the paper's, whose middle 28x28 its AlexNet sees


def default_name(spec: DataSpec) -> str:
    """The model where the experiment names none: the paper's for pictures like the paper's, a small one for others."""
    if spec.vocabulary:
        return "lstm"
    return "alexnet" if len(spec.shape) == 3 and min(spec.shape[1:]) >= LARGE else "mlp"


def build(name: Any, spec: DataSpec, seed: int) -> nn.Module:
    """The module that `model.name` stands for, initialised from the seed; a module given as such is copied."""
    if isinstance(name, nn.Module):
        return deepcopy(name)
    name = default_name(spec) if name is None else name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "init"))
        if pretrained.is_pretrained(name):
            return pretrained.load(name, spec)
        if isinstance(name, str) and name in ZOO:
            check_samples(name, spec)
            return ZOO[name](spec.shape, spec.outputs, **extra_arguments(ZOO[name], spec))
        return build_own(name, spec)


def check_samples(name: str, spec: DataSpec) -> None:
    """Refuse samples of another kind than the model of the zoo is for."""
    if spec.vocabulary and not takes_tokens(ZOO[name]):
        others = [other for other, make in ZOO.items() if takes_tokens(make)]
        raise BadExperiment(
            f'model.name = "{name}" takes numbers, but samples are token ids: use {" or ".join(others)}'
        )
    if takes_tokens(ZOO[name]) and not spec.vocabulary:
        raise BadExperiment(f'model.name = "{name}" needs token ids, but a sample is {list(spec.shape)} numbers')


def takes_tokens(make: Any) -> bool:
    return "vocabulary" in parameters(make)


def extra_arguments(make: Any, spec: DataSpec) -> dict[str, Any]:
    """The arguments besides shape and outputs that the function has parameters for."""
    return {name: getattr(spec, name) for name in EXTRA if name in parameters(make)}


def build_own(name: Any, spec: DataSpec) -> nn.Module:
    """The module that a function or class of the user's makes."""
    make = import_object(name, "shape", "outputs", may_take=EXTRA) if isinstance(name, str) else name
    try:
        module = make(spec.shape, spec.outputs, **extra_arguments(make, spec))
    except Exception as error:  # code of the user's may raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadExperiment(f"model.name: {name} fails when it is called with (shape, outputs): {why}") from error
    if not isinstance(module, nn.Module):
        raise BadExperiment(f"model.name: {name} must return a torch.nn.Module, not {type(module).__name__}")
    return module


def parameters(make: Any) -> tuple[str, ...]:
    try:
        return tuple(signature(make).parameters)
    except (TypeError, ValueError):  # it does not say what it takes
        return ()
