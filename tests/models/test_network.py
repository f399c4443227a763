"""The compiled loop over a chain of linear layers takes autograd's steps, as exactly as float32 allows."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedcluster
from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.fleet import fleet as fleets
from fedcluster.models import zoo as models
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.kernels import build
from fedcluster.models.kernels import library as compiled
from fedcluster.models.kernels import network as networks
from fedcluster.runs.progress import Display
from fedcluster.training.acceptance import finite
from fedcluster.training.evaluation import SAMPLE, Evaluator

needs_compiler = pytest.mark.skipif(compiled.library() is None, reason="there is no C compiler here")


def by_autograd(module: nn.Module, x: Tensor, y: Tensor, batch: int, lr: float) -> Tensor:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for rows, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(module(rows.to(next(module.parameters()).dtype)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def by_torch(module: nn.Module) -> FlatModel:
    flat_model = FlatModel(module)
    flat_model.network = None
    return flat_model


def local_sgd(flat_model: FlatModel, x: Tensor, y: Tensor, batch: int, lr: float, drift: Tensor | None = None) -> None:
    """Over the batches of x in their order, or in any other: rows are found by their places."""
    assert flat_model.network is not None
    order = torch.randperm(len(y))
    shuffled = fedcluster.Dataset(x[order], y[order], x, y)
    flat_model.network.sgd(shuffled, torch.argsort(order).view(-1, batch), lr, drift)


def network(*sizes: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Flatten()]
    for i, o in pairwise(sizes):
        parts += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def sees_bytes(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Steps on bytes are those on the numbers that the model sees."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (40, *shape), generator=rng).to(torch.uint8)
    dataset = fedcluster.Dataset(x, torch.arange(40) % 4, x, torch.arange(40) % 4)
    flat_model, plain = FlatModel(module), by_torch(module)
    assert flat_model.network is not None
    rows = torch.randint(40, (3, 6), generator=rng)
    flat_model.network.sgd(dataset, rows, lr=0.1)
    for batch in rows:
        plain.compute_gradient(dataset.inputs(dataset.x_train[batch]), dataset.y_train[batch])
        plain.w.sub_(plain.gradient, alpha=0.1)
    torch.testing.assert_close(flat_model.w, plain.w, rtol=1e-5, atol=1e-6)


def adds_drift(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """After every step, as torch does."""
    flat_model, plain = FlatModel(module), by_torch(module)
    x, y, drift = torch.randn(20, *shape), torch.randint(classes, (20,)), torch.randn(plain.size) * 0.01
    local_sgd(flat_model, x, y, 5, 0.1, drift)
    for rows, labels in zip(torch.split(x, 5), torch.split(y, 5), strict=True):
        plain.compute_gradient(rows, labels)
        plain.w.sub_(plain.gradient, alpha=0.1).add_(drift)
    torch.testing.assert_close(flat_model.w, plain.w, rtol=1e-5, atol=1e-6)


def evaluates_like_torch(module: nn.Module, shape: tuple[int, ...], rows: int, threads: int) -> None:
    x = torch.randint(256, (rows, *shape)).to(torch.uint8)
    dataset = fedcluster.Dataset(x, torch.arange(rows) % 5, x, torch.arange(rows) % 5, classes=5)
    options = fedcluster.Experiment(fleet={"devices": 1, "samples": 1, "partition": "iid"}).fleet
    flat_model = FlatModel(module)
    evaluate = Evaluator(flat_model, dataset, fleets.build(options, dataset, 0)[1].pooled(SAMPLE, 0))
    evaluate.threads = threads
    fast = evaluate(flat_model.w.clone())
    flat_model.network = None
    slow = evaluate(flat_model.w.clone())
    assert fast == pytest.approx(slow, rel=1e-5)
    assert fast["test_accuracy"] == slow["test_accuracy"]


@needs_compiler
@pytest.mark.parametrize("sizes", [(64, 10), (784, 200, 200, 10), (7, 5, 3), (33, 17, 9, 8, 2), (16, 16, 1)])
@pytest.mark.parametrize("batch", [30, 1, 7, 13])
def test_as_close_to_the_truth_as_autograd(sizes: tuple[int, ...], batch: int) -> None:
    torch.manual_seed(0)
    module = network(*sizes)
    x, y = torch.randn(3 * batch, sizes[0]), torch.randint(sizes[-1], (3 * batch,))
    truth = by_autograd(deepcopy(module).double(), x, y, batch, lr=0.1)
    theirs = by_autograd(deepcopy(module), x, y, batch, lr=0.1)
    flat_model = FlatModel(module)
    local_sgd(flat_model, x, y, batch, lr=0.1)
    found = flat_model.w.double()
    assert (found - truth).norm() <= 2 * (theirs - truth).norm() + 1e-7
    assert (found - truth).abs().max() < 1e-6


@needs_compiler
@pytest.mark.parametrize("shape", [(784, 200), (200, 10), (9, 10), (101, 100)])
def test_small_steps_are_not_lost(shape: tuple[int, int]) -> None:
    """Thirty terms, each too small to change a weight, together change it."""
    flat_model = FlatModel(network(*shape))
    flat_model.w.fill_(1.0)
    y = torch.zeros(30, dtype=torch.int64)
    local_sgd(flat_model, torch.full((30, shape[0]), 1e-2), y, 30, lr=1e-4)  # towards class 0: 30 terms of about 3e-8
    expected = 1e-6 * (1 - 1 / shape[1])
    assert flat_model.w[: shape[0]].double().sub(1).mean().item() == pytest.approx(expected, abs=6e-8)


@needs_compiler
@pytest.mark.parametrize("sizes", [(64, 10), (33, 17, 9, 2)])
def test_drift_is_added_after_every_step(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    adds_drift(network(*sizes), sizes[:1], sizes[-1])


@needs_compiler
@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn", "alexnet"])
def test_gradients_are_as_close_to_the_truth_as_autograds(model: str) -> None:
    torch.manual_seed(0)
    module = models.build(model, (3, 9, 7), 10, seed=0)
    flat_model, plain, truth = FlatModel(module), by_torch(module), deepcopy(module).double()
    for batch in (7, 1, 30, 7):
        x, y = torch.randn(batch, 3, 9, 7), torch.randint(10, (batch,))
        before = flat_model.w.clone()
        flat_model.compute_gradient(x, y)
        plain.compute_gradient(x, y)
        assert torch.equal(flat_model.w, before)
        slopes = torch.autograd.grad(F.cross_entropy(truth(x.double()), y), list(truth.parameters()))
        exact = torch.cat([slope.flatten() for slope in slopes])
        assert (flat_model.gradient - exact).norm() <= 2 * (plain.gradient - exact).norm() + 1e-7


@needs_compiler
def test_what_is_not_a_number_stays_that() -> None:
    """A run that diverges must be seen to."""
    flat_model = FlatModel(network(8, 6, 3))
    flat_model.w[0] = float("nan")
    local_sgd(flat_model, torch.ones(4, 8), torch.zeros(4, dtype=torch.int64), 4, lr=0.1)
    assert not torch.isfinite(flat_model.w[-3:]).any(), "it has gone through every layer"


@needs_compiler
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_are_seen_as_the_model_sees_them(channels: int) -> None:
    sees_bytes(network(25 * channels, 7, 4), (channels, 5, 5))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 60, 61, 250])
def test_evaluation_finds_what_torch_finds(threads: int, rows: int) -> None:
    torch.manual_seed(0)
    evaluates_like_torch(network(48, 11, 5), (3, 4, 4), rows, threads)


@needs_compiler
@pytest.mark.parametrize("size", [1, 8, 1003])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3.4e38, 0.0, 1e-45])
def test_what_is_finite_is_known_in_every_place(size: int, odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in {0, size // 2, size - 1}:
        vector = torch.full((size,), 3.4e38)  # the sum is not finite
        vector[place] = odd
        assert finite(vector) == math.isfinite(odd)
        assert compiled.applies(vector)
        with monkeypatch.context() as without:
            without.setattr(compiled, "library", lambda: None)
            assert finite(vector) == math.isfinite(odd)


def mean_of(weighted: list[tuple[float, dict[str, torch.Tensor]]]) -> torch.Tensor:
    mean = Mean(weighted[0][1])
    for weight, message in weighted:
        mean.accumulate(message, weight)
    aggregate = mean.finish()
    assert aggregate is not None
    return aggregate.message["model"]


@needs_compiler
def test_averages_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vectors = [torch.randn(5003) * 10.0 ** torch.randint(-9, 3, (5003,)) for _ in range(7)]
    weighted = [
        (weight, {"model": vector})
        for weight, vector in zip([0.1, 0.3, 1 / 3, 0.05, 1e-6, 0.2, 0.125], vectors, strict=True)
    ]
    fast = mean_of(weighted)
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert torch.equal(fast, mean_of(weighted))


@needs_compiler
def test_our_models_are_chains() -> None:
    for model in (models.MLP, models.Logistic):
        assert FlatModel(model((1, 8, 8), 10)).network is not None


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) * 2  # type: ignore[no-any-return]


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    module[0].bias.requires_grad_(False)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: Own(nn.Linear(4, 3)),
    "weights used twice": tied,
    "a hook": hooked,
    "a frozen bias": frozen,
    "no bias": lambda: nn.Sequential(nn.Linear(4, 3, bias=False)),
    "another activation": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)),
    "ends with ReLU": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "two layers on end": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
    "too many layers": lambda: network(*[3] * 18),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_chain_is_left_to_autograd(name: str) -> None:
    assert FlatModel(OTHERS[name]()).network is None


EXPERIMENT = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 20, "samples": 30},
    clusters={"count": 2, "participation": 0.5},
    model={"name": "mlp"},
    local={"steps": 5, "batch": 8, "lr": 0.1},
)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a new process with an empty cache."""
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    compiled.library.cache_clear()
    yield tmp_path / "cache"
    compiled.library.cache_clear()


def weights(**how: object) -> Tensor:
    model = fedcluster.run(EXPERIMENT, display=Display(), **how).model  # type: ignore[arg-type]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@needs_compiler
def test_without_a_compiler_torch_does_the_work(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = weights()
    monkeypatch.setenv("PATH", "/nowhere")
    compiled.library.cache_clear()
    assert compiled.library() is None
    slow = weights()
    assert not torch.equal(slow, fast), "it was the same code"
    torch.testing.assert_close(slow, fast, rtol=1e-5, atol=1e-6)


def test_a_compiler_that_fails_is_none(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    assert compiled.library() is None
    assert not list(anew.glob("compiled/*"))


@needs_compiler
def test_a_wrong_result_is_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in compiled.SOURCE.parent.glob("*.[ch]"):
        (tmp_path / path.name).write_text(path.read_text())
    source = tmp_path / "chain.c"
    monkeypatch.setattr(compiled, "SOURCE", source)
    assert compiled.library() is not None
    for name, right, wrong in [
        ("chain.c", "-lr / batch", "-2 * lr / batch"),
        ("pool.h", "other > best", "other < best"),
        ("back.h", "from[o] != 0", "from[o] > 0"),
        ("normalise.h", "1.5f", "1.4f"),
    ]:
        text = (tmp_path / name).read_text()
        assert right in text
        (tmp_path / name).write_text(text.replace(right, wrong))
        compiled.library.cache_clear()
        assert compiled.library() is None
        (tmp_path / name).write_text(text)


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(anew: Path) -> None:
    assert compiled.library() is not None
    (library,) = anew.glob("compiled/*.so")
    os.chmod(library, 0o777)
    compiled.library.cache_clear()
    assert compiled.library() is None


@pytest.mark.parametrize(("inputs", "compiles"), [(2048, True), (2049, False)])
def test_layers_on_which_torch_is_faster_are_left_to_it(inputs: int, compiles: bool) -> None:
    module = nn.Sequential(nn.Linear(inputs, 2048, device="meta"), nn.ReLU(), nn.Linear(2048, 10, device="meta"))
    assert (networks.architecture_of(module) is not None) == compiles


@needs_compiler
@pytest.mark.parametrize("batch", [5, 300])
def test_wide_layers_find_what_torch_finds(batch: int) -> None:
    """Rows that would be a power of two apart, and a batch for which tiles are grouped."""
    torch.manual_seed(0)
    sizes = nn.Linear(30, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 5)
    flat_model = FlatModel(nn.Sequential(*sizes))
    assert flat_model.network is not None
    plain = by_torch(nn.Sequential(*sizes))
    x, y = torch.randn(batch, 30), torch.randint(5, (batch,))
    flat_model.compute_gradient(x, y)
    plain.compute_gradient(x, y)
    torch.testing.assert_close(flat_model.gradient, plain.gradient, rtol=1e-4, atol=1e-6)


def damaged(content: bytes, how: str) -> bytes:
    if how == "torn":
        return content[:4096]
    if how == "empty":
        return b""
    altered = bytearray(content)
    for place in range(64, len(altered), 4096):
        altered[place] ^= 0x10
    return bytes(altered)


@needs_compiler
@pytest.mark.parametrize("how", ["torn", "empty", "flipped", "without its digest"])
def test_a_damaged_library_is_built_again(anew: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    path = build.library_file(compiled.SOURCE, anew)
    good, inode = path.read_bytes(), path.stat().st_ino
    assert build.library_file(compiled.SOURCE, anew).stat().st_ino == inode
    if how == "without its digest":
        build.digest_file(path).unlink()
    else:
        path.write_bytes(damaged(good, how))
    assert build.library_file(compiled.SOURCE, anew).read_bytes() == good
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".sha256", ".so"]


@needs_compiler
def test_a_run_with_a_damaged_library_finds_what_it_should(anew: Path, tmp_path: Path) -> None:
    """In processes of their own: what is loaded from a torn file ends in SIGBUS."""
    code = """
import sys
from pathlib import Path
import fedcluster
from fedcluster.models.kernels import build, library as compiled
from fedcluster.runs.progress import Display
build.FLAGS[0] = "-O0"
from tests.models.test_network import EXPERIMENT
fedcluster.run(EXPERIMENT, sys.argv[1], display=Display())
assert compiled.library() is not None
"""
    models = []
    for name in ("good", "after"):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], cwd=Path(__file__).parents[2])
        assert done.returncode == 0
        models.append((tmp_path / name / "model.safetensors").read_bytes())
        (library,) = anew.glob("compiled/*.so")
        library.write_bytes(damaged(library.read_bytes(), "torn"))
    assert models[0] == models[1]


@needs_compiler
def test_what_does_not_run_is_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out by a child process, so that it is the one to die."""
    monkeypatch.setattr(build, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    with pytest.raises(build.Unavailable, match="does not run"):
        build.library_file(compiled.SOURCE, anew)
    assert not list(anew.glob("compiled/*"))


def test_one_line_says_that_torch_does_the_work(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Display, "say", lambda self, text: said.append(text))
    monkeypatch.setenv("PATH", "/nowhere")
    weights()
    assert said == ["training with torch, which is slower for this model: there is no C compiler (cc, gcc or clang)"]


@needs_compiler
def test_a_run_that_goes_on_with_other_arithmetic_says_so(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Listen(Display):
        said: list[str] = []  # noqa: RUF012

        def say(self, text: str) -> None:
            self.said.append(text)

    fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
    (tmp_path / "run" / "model.safetensors").unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    compiled.library.cache_clear()
    fedcluster.run(EXPERIMENT, tmp_path / "run", resume=True, display=Listen())
    assert any("begun with compiled steps, going on with torch ones" in text for text in Listen.said)
