"""Federated averaging by a hand-written PyTorch loop."""

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

DEVICES, SAMPLES, COHORT, STEPS, BATCH, RATE, WORKERS = 1000, 500, 100, 20, 30, 0.05, 2
ALPHA, BETA, SIZE = 0.001, 0.75, 9
SHAPES = {
    "mlp": [(200, 784), (200,), (200, 200), (200,), (10, 200), (10,)],
    "alexnet": [(64, 1, 5, 5), (64,), (64, 64, 5, 5), (64,), (384, 3136), (384,), (192, 384), (192,), (10, 192), (10,)],
}

Forward = Callable[[Tensor, list[Tensor]], Tensor]


def dense(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Linear layers with ReLU between them."""
    for i in range(0, len(weights) - 2, 2):
        x = F.linear(x, weights[i], weights[i + 1]).relu_()
    return F.linear(x, *weights[-2:])


def default(x: Tensor, weights: list[Tensor]) -> Tensor:
    """alexnet as one would write it."""
    x = x.view(-1, 1, 28, 28)
    for i in (0, 2):
        x = F.max_pool2d(F.conv2d(x, weights[i], weights[i + 1], padding=2).relu_(), 3, 2, ceil_mode=True)
        x = F.local_response_norm(x, SIZE, ALPHA, BETA, 1.0)
    return dense(x.flatten(1), weights[4:])


class Norm(torch.autograd.Function):
    """Local response normalisation of rows of 64 channels; the window sum is a product with a banded matrix."""

    band = (torch.arange(64)[:, None] - torch.arange(64)).abs().le(SIZE // 2) * (ALPHA / SIZE)

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        root = torch.mm(x * x, Norm.band).add_(1.0).rsqrt_()  # d ** -0.5
        scale = root.sqrt().mul_(root)  # d ** -0.75
        y = x * scale
        ctx.save_for_backward(x, y, root, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        x, y, root, scale = ctx.saved_tensors
        inner = torch.mm((grad * y).mul_(root).mul_(root), Norm.band).mul_(x)
        return (grad * scale).sub_(inner, alpha=2 * BETA)


def pool_norm(x: Tensor) -> Tensor:
    """Max-pooling, ReLU (on a quarter of the values, as it commutes) and normalisation, of a channels_last x."""
    x = F.max_pool2d(x, 3, 2, ceil_mode=True).relu_().permute(0, 2, 3, 1)
    return Norm.apply(x.reshape(-1, 64)).view(x.shape).permute(0, 3, 1, 2)


def tuned(x: Tensor, weights: list[Tensor]) -> Tensor:
    """alexnet in channels_last."""
    n = len(x)
    patches = F.pad(x.view(n, 28, 28), (2, 2, 2, 2)).as_strided((n, 28, 28, 5, 5), (1024, 32, 1, 32, 1))
    x = F.linear(patches.reshape(-1, 25), weights[0].view(64, 25), weights[1]).view(n, 28, 28, 64).permute(0, 3, 1, 2)
    x = pool_norm(x)
    x = F.conv2d(x.contiguous(), weights[2], weights[3], padding=2).contiguous(memory_format=torch.channels_last)
    return dense(pool_norm(x).permute(0, 2, 3, 1).reshape(n, -1), weights[4:])


def views(flat: Tensor, model: str) -> list[Tensor]:
    """The parameters, as views of one flat vector."""
    shapes = [torch.Size(s) for s in SHAPES[model]]
    return [part.view(s) for part, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def eager(forward: Forward, values: list[Tensor], weights: list[Tensor], x: Tensor, y: Tensor) -> None:
    """One SGD step by autograd; `weights` are leaves on the memory of `values`."""
    grads = torch.autograd.grad(F.cross_entropy(forward(x, weights), y), weights)
    torch._foreach_add_(values, grads, alpha=-RATE)


@torch.compile(dynamic=False, fullgraph=True)
def compiled(forward: Forward, values: list[Tensor], weights: list[Tensor], x: Tensor, y: Tensor) -> None:
    """The same step as one graph: forward, backward and update."""
    grads = torch.func.grad(lambda w: F.cross_entropy(forward(x, w), y))(values)
    for value, grad in zip(values, grads, strict=True):
        value.sub_(grad, alpha=RATE)


def worker(rank, barrier, model, forward, step, data, params, sums, cohort, counter, rounds) -> None:
    torch.set_num_threads(1)
    x_train, y_train, rows = data
    local, total, generator = torch.empty_like(params), sums[rank], torch.Generator()
    values = views(local, model)
    weights = [v.detach().requires_grad_() for v in values]
    for round_ in range(rounds):
        barrier.wait()
        total.zero_()
        while True:
            with counter.get_lock():
                turn, counter.value = counter.value, counter.value + 1
            if turn >= len(cohort):
                break
            device = int(cohort[turn])
            local.copy_(params)
            generator.manual_seed(round_ * DEVICES + device)
            picked = rows[device][torch.randint(SAMPLES, (STEPS * BATCH,), generator=generator)]
            for x, y in zip(x_train[picked].split(BATCH), y_train[picked].split(BATCH), strict=True):
                step(forward, values, weights, x, y)
            total.add_(local)
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="bench.npz of make_data.py")
    parser.add_argument("--model", choices=["mlp", "alexnet"], required=True)
    parser.add_argument("--rounds", type=int, required=True, help="rounds trained, the first an untimed warm-up")
    parser.add_argument("--layout", choices=["default", "tuned"], default="tuned", help="of alexnet")
    parser.add_argument("--eager", action="store_true", help="mlp without torch.compile (which needs g++)")
    parser.add_argument("--cohort", type=int, default=COHORT, help="devices in a round (fewer only to try the script)")
    args = parser.parse_args()
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # for the workers, which are spawned
    forward = dense if args.model == "mlp" else tuned if args.layout == "tuned" else default
    step = compiled if args.model == "mlp" and not args.eager else eager

    with np.load(args.data) as file:
        x_train, y_train, x_test, y_test, rows = (
            torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test", "rows")
        )
    torch.manual_seed(0)
    params = torch.empty(sum(torch.Size(s).numel() for s in SHAPES[args.model]))
    weights = views(params, args.model)
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        bound = weight[0].numel() ** -0.5  # as torch.nn does
        weight.uniform_(-bound, bound), bias.uniform_(-bound, bound)

    context = mp.get_context("spawn")
    sums, cohort = torch.zeros(WORKERS, len(params)).share_memory_(), torch.zeros(args.cohort, dtype=torch.long)
    data = tuple(t.share_memory_() for t in (x_train, y_train, rows.long()))
    counter, barrier = context.Value("i", 0), context.Barrier(WORKERS + 1, timeout=1800)
    shared = (barrier, args.model, forward, step, data, params.share_memory_(), sums, cohort.share_memory_(), counter)
    workers = mp.start_processes(worker, (*shared, args.rounds), WORKERS, join=False, daemon=True)

    rng, seconds = np.random.default_rng(1), []
    for _ in range(args.rounds):
        cohort.copy_(torch.from_numpy(rng.choice(DEVICES, args.cohort, replace=False)))
        counter.value = 0
        start = time.perf_counter()
        barrier.wait()  # the workers begin
        barrier.wait()  # the workers are done
        torch.sum(sums, 0, out=params).div_(args.cohort)
        seconds.append(time.perf_counter() - start)
    workers.join()
    with torch.no_grad():
        hits = sum(
            int((forward(x, weights).argmax(1) == y).sum())
            for x, y in zip(x_test.split(500), y_test.split(500), strict=True)
        )
    name = "torch-default" if forward is default else "torch"
    print(
        json.dumps(
            {
                "name": name,
                "model": args.model,
                "seconds": [round(s, 4) for s in seconds[1:]],
                "accuracy": hits / len(y_test),
                "rounds": args.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
