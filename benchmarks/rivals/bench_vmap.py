"""Federated averaging by torch.func: vmap(grad) over stacks of devices."""

import argparse
import json
import os
import sys
import time

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

DEVICES, SAMPLES, COHORT, STEPS, BATCH, RATE, CLASSES, WORKERS = 1000, 500, 100, 20, 30, 0.05, 10, 2
SHAPES = [(200, 784), (200,), (200, 200), (200,), (CLASSES, 200), (CLASSES,)]


def forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    for i in (0, 2):
        x = (x @ weights[i].t() + weights[i + 1]).relu()
    return x @ weights[4].t() + weights[5]


def loss(weights: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with one-hot targets."""
    return -(forward(x, weights).log_softmax(1) * target).sum() / BATCH


def step(weights: list[Tensor], x: Tensor, target: Tensor) -> None:
    """One SGD step of a stack of devices, in place."""
    for weight, slope in zip(weights, vmap(grad(loss))(weights, x, target), strict=True):
        weight.sub_(slope, alpha=RATE)


def views(flat: Tensor) -> list[Tensor]:
    """The parameters, as views of one flat vector."""
    shapes = [torch.Size(s) for s in SHAPES]
    return [part.view(s) for part, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


@torch.no_grad()
def train(run, params: Tensor, total: Tensor, data: tuple[Tensor, ...], devices: Tensor, round_: int) -> None:
    """The work of a stack of devices in one round; adds their models to `total`."""
    x_train, y_train, rows = data
    torch.manual_seed(round_ * DEVICES + int(devices[0]))
    picked = rows[devices].gather(1, torch.randint(SAMPLES, (len(devices), STEPS * BATCH)))
    x = x_train[picked].view(len(devices), STEPS, BATCH, -1)
    target = F.one_hot(y_train[picked], CLASSES).float().view(len(devices), STEPS, BATCH, CLASSES)
    weights = [w.expand(len(devices), *w.shape).contiguous() for w in views(params)]
    for i in range(STEPS):
        run(weights, x[:, i], target[:, i])
    for part, weight in zip(views(total), weights, strict=True):
        part.add_(weight.sum(0))


def worker(rank, barrier, args, data, params, sums, cohort, counter) -> None:
    torch.set_num_threads(1)
    run = step if args.eager else torch.compile(step, dynamic=False, fullgraph=True)
    for round_ in range(args.rounds):
        barrier.wait()
        sums[rank].zero_()
        while True:
            with counter.get_lock():
                first, counter.value = counter.value, counter.value + args.chunk
            if first >= len(cohort):
                break
            train(run, params, sums[rank], data, cohort[first : first + args.chunk], round_)
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="bench.npz of make_data.py")
    parser.add_argument("--model", choices=["mlp", "alexnet"], required=True)
    parser.add_argument("--rounds", type=int, required=True, help="rounds trained, the first an untimed warm-up")
    parser.add_argument("--chunk", type=int, default=5, help="devices in a stack")
    parser.add_argument("--eager", action="store_true", help="without torch.compile (which needs g++)")
    parser.add_argument("--cohort", type=int, default=COHORT, help="devices in a round (fewer only to try the script)")
    args = parser.parse_args()
    if args.model == "alexnet":
        print("bench_vmap.py has no alexnet: only --model mlp", file=sys.stderr)
        sys.exit(3)
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # for the workers, which are spawned

    with np.load(args.data) as file:
        x_train, y_train, x_test, y_test, rows = (
            torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test", "rows")
        )
    torch.manual_seed(0)
    params = torch.empty(sum(torch.Size(s).numel() for s in SHAPES))
    weights = views(params)
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        bound = weight[0].numel() ** -0.5  # as torch.nn does
        weight.uniform_(-bound, bound), bias.uniform_(-bound, bound)

    context = mp.get_context("spawn")
    sums, cohort = torch.zeros(WORKERS, len(params)).share_memory_(), torch.zeros(args.cohort, dtype=torch.long)
    data = tuple(t.share_memory_() for t in (x_train, y_train, rows.long()))
    counter, barrier = context.Value("i", 0), context.Barrier(WORKERS + 1, timeout=1800)
    shared = (barrier, args, data, params.share_memory_(), sums, cohort.share_memory_(), counter)
    workers = mp.start_processes(worker, shared, WORKERS, join=False, daemon=True)

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
    hits = int((forward(x_test, weights).argmax(1) == y_test).sum())
    print(
        json.dumps(
            {
                "name": "vmap",
                "model": args.model,
                "seconds": [round(s, 4) for s in seconds[1:]],
                "accuracy": hits / len(y_test),
                "rounds": args.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
