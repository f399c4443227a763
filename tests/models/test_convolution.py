"""The compiled loop over blocks of convolution and the layers after them takes autograd's steps."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcluster.models import zoo as models
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.layers import Crop, InputConv2d, Normalise, PoolSame
from tests.models.test_network import (
    adds_step_offset,
    by_autograd,
    by_torch,
    evaluates_like_torch,
    local_sgd,
    needs_compiler,
    trains_on_bytes,
)

Shape = tuple[int, int, int]
Make = Callable[..., nn.Sequential]


def network(shape: Shape, *maps: int, hidden: int = 11, classes: int = 5) -> nn.Sequential:
    channels, height, width = shape
    parts: list[nn.Module] = []
    for i, o in pairwise([channels, *maps]):
        parts += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        height, width = height // 2, width // 2
    features = maps[-1] * height * width
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def alexnet(shape: Shape, *maps: int, kernel: int = 5, classes: int = 5) -> nn.Sequential:
    """The small AlexNet's form, with few maps."""
    channels, height, width = shape[0], min(shape[1], 28), min(shape[2], 28)
    parts: list[nn.Module] = [Crop(28)]
    for i, o in pairwise([channels, *maps]):
        first = not parts[1:]
        convolution = InputConv2d(i, o, kernel) if first else nn.Conv2d(i, o, kernel, padding=kernel // 2)
        parts += [convolution, PoolSame(), nn.ReLU(), Normalise()]
        height, width = -(-height // 2), -(-width // 2)
    features = maps[-1] * height * width
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, 11), nn.ReLU(), nn.Linear(11, classes))


def mixed(shape: Shape) -> nn.Sequential:
    """Every kernel with every way of pooling."""
    parts = [
        *(nn.Conv2d(shape[0], 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 5, 3, padding=1), nn.ReLU(), PoolSame()),
        *(nn.Conv2d(5, 64, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), Normalise()),
        *(nn.Conv2d(64, 9, 3, padding=1), PoolSame(), nn.ReLU()),
    ]
    return classifier(parts, shape)


def unpadded(shape: Shape) -> nn.Sequential:
    """Every kernel with less padding than "same", with every way of pooling."""
    parts = [
        *(nn.Conv2d(shape[0], 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 6, 5, padding=1), nn.ReLU(), PoolSame(), Normalise()),
        *(nn.Conv2d(6, 9, 3, padding="valid"), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(9, 7, 3, padding="same"), PoolSame(), nn.ReLU()),
    ]
    return classifier(parts, shape)


def lenet(shape: Shape) -> nn.Sequential:
    first, second = nn.Conv2d(shape[0], 6, 5), nn.Conv2d(6, 16, 5)
    return classifier([first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)], shape, 120, 84)


def classifier(blocks: list[nn.Module], shape: Shape, *hidden: int) -> nn.Sequential:
    """Linear layers of these widths after blocks, and five classes."""
    parts = [*blocks, nn.Flatten()]
    features = nn.Sequential(*parts)(torch.ones(1, *shape)).numel()
    for i, o in pairwise([features, *hidden, 5]):
        parts += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


CASES: list[tuple[Shape, tuple[int, ...]]] = [
    ((1, 28, 28), (16, 32)),
    ((3, 32, 32), (16, 32)),
    ((1, 9, 7), (5,)),
    ((3, 9, 7), (9, 13)),
    ((2, 2, 5), (8,)),
    ((6, 11, 13), (24, 3)),
    ((9, 8, 10), (17, 40, 1)),
    ((3, 17, 19), (8, 11, 16)),
]


@needs_compiler
@pytest.mark.parametrize(("shape", "maps"), CASES)
@pytest.mark.parametrize("batch", [30, 1, 7])
def test_as_close_to_the_truth_as_autograd(shape: Shape, maps: tuple[int, ...], batch: int) -> None:
    torch.manual_seed(0)
    module = network(shape, *maps)
    x, y = torch.randn(3 * batch, *shape), torch.randint(5, (3 * batch,))
    check(module, x, y, batch)


def check(module: nn.Module, x: Tensor, y: Tensor, batch: int, lr: float = 0.1, times: float = 2) -> None:
    truth = by_autograd(deepcopy(module).double(), x, y, batch, lr)
    theirs = by_autograd(deepcopy(module), x, y, batch, lr)
    flat_model = FlatModel(module)
    local_sgd(flat_model, x, y, batch, lr)
    found = flat_model.w.double()
    assert (found - truth).norm() <= times * (theirs - truth).norm() + 1e-7
    assert (found - truth).abs().max() < 1e-6 * max(1.0, float(truth.abs().max()))


OVERLAPPING: list[tuple[Shape, tuple[int, ...]]] = [
    ((1, 28, 28), (8, 16)),
    ((3, 32, 32), (16, 8)),
    ((3, 30, 29), (5, 9)),
    ((3, 9, 7), (64, 64)),
    ((1, 5, 5), (7,)),
    ((1, 6, 8), (9, 13, 3)),
    ((2, 1, 2), (4, 8)),
]


@needs_compiler
@pytest.mark.parametrize(("shape", "maps"), OVERLAPPING)
@pytest.mark.parametrize("batch", [1, 7])
def test_overlapping_windows_and_normalisation(shape: Shape, maps: tuple[int, ...], batch: int) -> None:
    torch.manual_seed(0)
    module = alexnet(shape, *maps, kernel=5 if batch > 1 else 3)
    times = 2 if batch > 1 else 4  # steps on a single sample magnify what is rounded in the one before
    check(module, torch.randn(3 * batch, *shape), torch.randint(5, (3 * batch,)), batch, times=times)


@needs_compiler
def test_normalisation_of_large_numbers() -> None:
    torch.manual_seed(0)
    check(alexnet((3, 9, 7), 17, 12), torch.randn(15, 3, 9, 7) * 100, torch.randint(5, (15,)), 5, lr=0.001)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 16, 19), (3, 21, 13)])
def test_blocks_of_every_kind(shape: Shape) -> None:
    torch.manual_seed(0)
    check(mixed(shape), torch.randn(18, *shape), torch.randint(5, (18,)), 6)


@needs_compiler
@pytest.mark.parametrize("make", [unpadded, lenet])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 31, 24)])
def test_convolutions_without_zeros_around(make: Make, shape: Shape) -> None:
    torch.manual_seed(0)
    check(make(shape), torch.randn(18, *shape), torch.randint(5, (18,)), 6)
    evaluates_like_torch(make(shape), shape, rows=61, threads=1)


@needs_compiler
def test_a_padded_convolution_is_one_of_a_padded_image() -> None:
    """With the zeros as pixels of the samples, a convolution without padding takes the same steps to the bit."""
    torch.manual_seed(0)
    padded, x, y = network((3, 6, 7), 8), torch.randn(12, 3, 6, 7), torch.randint(5, (12,))
    bare = deepcopy(padded)
    bare[0] = nn.Conv2d(3, 8, 3)
    bare[0].load_state_dict(padded[0].state_dict())
    one, other = FlatModel(padded), FlatModel(bare)
    local_sgd(one, x, y, 4, lr=0.1)
    local_sgd(other, F.pad(x, (1, 1, 1, 1)), y, 4, lr=0.1)
    assert torch.equal(one.w, other.w)


@needs_compiler
def test_samples_that_are_too_small_are_refused() -> None:
    """3 x 3 pixels have no patch of 5 x 5: not even one of -1 x -1."""
    flat_model = FlatModel(nn.Sequential(nn.Conv2d(1, 1, 5), nn.ReLU(), PoolSame(), nn.Flatten(), nn.Linear(1, 5)))
    for shape in ((1, 3, 3), (1, 4, 6), (2, 5, 5), (25,)):
        with pytest.raises(ValueError, match="does not take samples"):
            local_sgd(flat_model, torch.ones(2, *shape), torch.zeros(2, dtype=torch.int64), 2, lr=0.1)


@needs_compiler
def test_the_small_alexnet() -> None:
    torch.manual_seed(0)
    check(models.AlexNet((3, 32, 32), 10), torch.randn(6, 3, 32, 32), torch.randint(10, (6,)), 3, lr=0.01)


@needs_compiler
def test_sums_are_formed_before_they_are_added() -> None:
    """Many terms, each too small to change a weight, together change it."""
    flat_model = FlatModel(network((1, 16, 16), 8))
    flat_model.w.normal_(std=0.1).round_(decimals=2)
    flat_model.w[:72] = 1.0
    plain, x = deepcopy(flat_model.w), torch.full((30, 1, 16, 16), 1e-2)
    exact = deepcopy(flat_model.module).double()
    truth = by_autograd(exact, x, torch.zeros(30, dtype=torch.int64), 30, lr=1e-3)
    local_sgd(flat_model, x, torch.zeros(30, dtype=torch.int64), 30, lr=1e-3)
    assert not torch.equal(truth[:72].float(), plain[:72])
    assert (flat_model.w - truth)[:72].abs().max() <= 6e-8


@needs_compiler
@pytest.mark.parametrize(("shape", "maps"), [((1, 8, 8), (4,)), ((3, 9, 7), (9, 13))])
@pytest.mark.parametrize("make", [network, alexnet])
def test_the_step_offset_is_added_after_every_step(make: Make, shape: Shape, maps: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    adds_step_offset(make(shape, *maps), shape, classes=5)


@needs_compiler
@pytest.mark.parametrize("where", range(8))
@pytest.mark.parametrize("make", [network, alexnet])
def test_nan_goes_through_every_layer(make: Make, where: int) -> None:
    """A run that diverges must be seen to, as torch sees it."""
    flat_model = FlatModel(make((1, 9, 8), 5, 6))
    list(flat_model.named(flat_model.w).values())[where].view(-1)[0] = float("nan")
    plain = by_torch(flat_model.module)
    x, y = torch.randn(4, 1, 9, 8), torch.zeros(4, dtype=torch.int64)
    local_sgd(flat_model, x, y, 4, lr=0.1)
    plain.compute_gradient(x, y)
    plain.w.sub_(plain.gradient, alpha=0.1)
    assert not torch.isfinite(flat_model.w[-5:]).any(), "NaN did not reach the last layer"
    assert flat_model.w.isnan().sum() > 5
    assert plain.w[-5:].isnan().all()


@needs_compiler
@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("make", [network, alexnet])
def test_of_equal_results_the_first_is_taken(make: Make, level: float) -> None:
    torch.manual_seed(0)
    x, y = torch.full((12, 3, 9, 9), level), torch.arange(12) % 5
    x[6:, :, ::2, ::3] = 2 * level
    module = make((3, 9, 9), 8, 6)
    flat_model = FlatModel(module)
    truth = by_autograd(deepcopy(module).double(), x, y, 6, lr=0.1)
    local_sgd(flat_model, x, y, 6, lr=0.1)
    torch.testing.assert_close(flat_model.w.double(), truth, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_are_standardised(channels: int) -> None:
    trains_on_bytes(network((channels, 6, 5), 7), (channels, 6, 5))


@needs_compiler
def test_batches_of_another_size_find_their_room() -> None:
    torch.manual_seed(0)
    module = alexnet((1, 9, 7), 5, 4)
    flat_model, plain = FlatModel(module), by_torch(module)
    for batch in (3, 8, 2, 8):
        x, y = torch.randn(batch, 1, 9, 7), torch.randint(5, (batch,))
        local_sgd(flat_model, x, y, batch, lr=0.1)
        plain.compute_gradient(x, y)
        plain.w.sub_(plain.gradient, alpha=0.1)
    torch.testing.assert_close(flat_model.w, plain.w, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 61, 250])
@pytest.mark.parametrize("make", [network, alexnet])
def test_evaluation_finds_what_torch_finds(make: Make, threads: int, rows: int) -> None:
    torch.manual_seed(0)
    evaluates_like_torch(make((3, 9, 8), 7, 10), (3, 9, 8), rows, threads)


@needs_compiler
def test_our_models_are_such() -> None:
    for model in (models.CNN, models.AlexNet):
        assert FlatModel(model((1, 8, 8), 10)).network is not None
        assert FlatModel(model((3, 5, 7), 10)).network is not None


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 8, 8), (1, 12, 8)])
def test_samples_of_another_shape_are_refused(shape: Shape) -> None:
    flat_model = FlatModel(network((1, 8, 8), 4))
    with pytest.raises(ValueError, match="does not take samples"):
        local_sgd(flat_model, torch.ones(4, *shape), torch.zeros(4, dtype=torch.int64), 4, lr=0.1)


def almost(at: int, part: nn.Module, insert: bool = False) -> Callable[[], nn.Module]:
    """A network one part of which is another."""

    def make() -> nn.Module:
        parts = list(network((3, 8, 8), 4, 4))
        parts[at : at + (not insert)] = [part]
        return nn.Sequential(*parts)

    return make


def frozen() -> nn.Module:
    module = network((3, 8, 8), 4)
    module[0].weight.requires_grad_(False)
    return module


def hooked(place: int, kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = network((3, 8, 8), 4)
        getattr(module[place], kind)(lambda *_: None)
        return module

    return make


def tied() -> nn.Module:
    module = network((4, 8, 8), 4, 4)
    module[3] = module[0]
    return module


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def repadded() -> nn.Module:
    module = network((3, 8, 8), 4)
    layer = InputConv2d(3, 4, 3)
    layer.padding = (0, 0)  # it is not looked at
    module[0] = layer
    return module


def convolution(**how: object) -> nn.Conv2d:
    return nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1, **how})  # type: ignore[arg-type]


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a larger kernel": almost(3, convolution(kernel_size=7, padding=3)),
    "an even kernel": almost(3, convolution(kernel_size=2, padding=1)),
    "more padding": almost(3, convolution(padding=2)),
    "uneven padding": almost(3, convolution(kernel_size=5, padding=(2, 1))),
    "another kernel": almost(3, convolution(kernel_size=(3, 1), padding=(1, 0))),
    "a stride": almost(3, convolution(stride=2)),
    "no bias": almost(3, convolution(bias=False)),
    "reflection": almost(3, convolution(padding_mode="reflect")),
    "dilation": almost(3, convolution(dilation=2, padding=2)),
    "groups": almost(3, convolution(groups=2)),
    "own convolution": almost(3, Doubled(4, 4, 3, padding=1)),
    "average pooling": almost(5, nn.AvgPool2d(2)),
    "larger pooling": almost(5, nn.MaxPool2d(3)),
    "overlapping pooling": almost(5, nn.MaxPool2d(2, stride=1)),
    "padded pooling": almost(5, nn.MaxPool2d(2, padding=1)),
    "dilated pooling": almost(5, nn.MaxPool2d(2, dilation=2)),
    "rounded up": almost(5, nn.MaxPool2d(2, ceil_mode=True)),
    "indices": almost(5, nn.MaxPool2d(2, return_indices=True)),
    "another activation": almost(4, nn.Tanh()),
    "two activations": almost(5, nn.ReLU()),
    "two poolings": almost(4, PoolSame()),
    "normalisation": almost(3, nn.BatchNorm2d(4), insert=True),
    "own normalisation": almost(6, Doubled(4, 4, 1), insert=True),
    "normalised twice": lambda: nn.Sequential(
        *list(alexnet((1, 8, 8), 4))[:5], Normalise(), *list(alexnet((1, 8, 8), 4))[5:]
    ),
    "cropped later": almost(3, Crop(8), insert=True),
    "cropped alone": lambda: nn.Sequential(Crop(4), nn.Flatten(), nn.Linear(16, 3)),
    "an input's convolution later": almost(3, InputConv2d(4, 4, 3)),
    "an input's convolution with other padding": repadded,
    "dropout": almost(3, nn.Dropout2d(), insert=True),
    "not flat": almost(6, nn.Identity()),
    "flat in part": almost(6, nn.Flatten(2)),
    "convolutions alone": lambda: nn.Sequential(convolution(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    "pooling missing": lambda: nn.Sequential(convolution(), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)),
    "weights used twice": tied,
    "a frozen weight": frozen,
    "a hook on a convolution": hooked(0, "register_forward_hook"),
    "a hook on pooling": hooked(2, "register_full_backward_hook"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_of_the_form_is_left_to_autograd(name: str) -> None:
    assert FlatModel(OTHERS[name]()).network is None


@needs_compiler
def test_pooling_may_be_described_in_pairs() -> None:
    assert FlatModel(almost(5, nn.MaxPool2d((2, 2), (2, 2)))()).network is not None
