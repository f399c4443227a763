"""Federated averaging by hand-written JAX."""

import argparse
import json
import multiprocessing as mp
import os
import time

os.environ["NPROC"] = "1"  # one thread per process; the workers, which are spawned, run these lines too
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

DEVICES, SAMPLES, COHORT, STEPS, BATCH, RATE, CLASSES, WORKERS = 1000, 500, 100, 20, 30, 0.05, 10, 2
SHAPES = {
    "mlp": [(784, 200), (200,), (200, 200), (200,), (200, 10), (10,)],
    "alexnet": [(25, 64), (64,), (5, 5, 64, 64), (64,), (3136, 384), (384,), (384, 192), (192,), (192, 10), (10,)],
}
SIZES = {model: [int(np.prod(s)) for s in shapes] for model, shapes in SHAPES.items()}
BAND = np.float32(np.abs(np.arange(64)[:, None] - np.arange(64)) <= 4) * np.float32(0.001 / 9)
Weights = tuple[Array, ...]


def mlp(weights: Weights, x: Array) -> Array:
    """Dense layers with ReLU between them."""
    for i in range(0, len(weights) - 2, 2):
        x = jax.nn.relu(x @ weights[i] + weights[i + 1])
    return x @ weights[-2] + weights[-1]


@jax.custom_vjp
def conv(x: Array, kernel: Array) -> Array:
    """Convolution 5x5, NHWC; both its gradients are spelled out as plain convolutions that XLA gives to Eigen."""
    return lax.conv_general_dilated(x, kernel, (1, 1), ((2, 2), (2, 2)), dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return (
        conv(grad, kernel[::-1, ::-1].transpose(0, 1, 3, 2)),
        conv(x.transpose(3, 1, 2, 0), grad.transpose(1, 2, 0, 3)).transpose(1, 2, 0, 3),
    )


conv.defvjp(lambda x, kernel: (conv(x, kernel), (x, kernel)), conv_backward)


def block(x: Array, bias: Array) -> Array:
    """Max-pooling 3x3 with stride 2 (slices of the rows, then of the columns), bias, ReLU, normalisation."""
    n = x.shape[1] - 1
    x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        x = jnp.maximum(
            jnp.maximum(*(lax.slice_in_dim(x, k, k + n, 2, axis) for k in (0, 1))),
            lax.slice_in_dim(x, 2, 2 + n, 2, axis),
        )
    x = jax.nn.relu(x + bias)
    root = lax.rsqrt(1 + ((x * x).reshape(-1, 64) @ BAND).reshape(x.shape))
    return x * root * jnp.sqrt(root)  # d ** -0.75


def alexnet(weights: Weights, x: Array) -> Array:
    x = jnp.pad(x.reshape(-1, 28, 28, 1), ((0, 0), (2, 2), (2, 2), (0, 0)))
    x = jnp.concatenate([x[:, i : i + 28, j : j + 28] for i in range(5) for j in range(5)], -1)
    x = block((x.reshape(-1, 25) @ weights[0]).reshape(-1, 28, 28, 64), weights[1])
    return mlp(weights[4:], block(conv(x, weights[2]), weights[3]).reshape(len(x), -1))


FORWARD = {"mlp": mlp, "alexnet": alexnet}


def views(flat: np.ndarray, model: str) -> list[np.ndarray]:
    """The parameters, as views of one flat vector."""
    parts = np.split(flat, np.cumsum(SIZES[model])[:-1])
    return [part.reshape(s) for part, s in zip(parts, SHAPES[model], strict=True)]


def worker(rank, barrier, args, params, sums, cohort, counter) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    forward = FORWARD[args.model]
    with np.load(args.data) as file:
        data = tuple(map(jnp.asarray, (file["x_train"], file["y_train"].astype(np.int32), file["rows"])))

    def loss(weights: Weights, x: Array, y: Array) -> Array:
        scores = jax.nn.log_softmax(forward(weights, x))
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], 1))

    def train(total: Weights, weights: Weights, data: tuple[Array, ...], device: int, seed: int) -> Weights:
        """The work of one device in one round; returns `total` plus its model."""
        x_train, y_train, rows = data
        picked = rows[device][jax.random.randint(jax.random.key(seed), (STEPS, BATCH), 0, SAMPLES)]

        def step(weights: Weights, batch: Array) -> tuple[Weights, None]:
            grads = jax.grad(loss)(weights, x_train[batch], y_train[batch])
            return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), None

        return jax.tree.map(jnp.add, total, lax.scan(step, weights, picked)[0])

    run = jax.jit(train, donate_argnums=0)
    for round_ in range(args.rounds):
        barrier.wait()
        weights = tuple(map(jnp.array, views(np.frombuffer(params, np.float32), args.model)))
        total = tuple(map(jnp.zeros_like, weights))
        while True:
            with counter.get_lock():
                turn, counter.value = counter.value, counter.value + 1
            if turn >= len(cohort):
                break
            total = run(total, weights, data, cohort[turn], round_ * DEVICES + cohort[turn])
        for part, value in zip(views(np.frombuffer(sums[rank], np.float32), args.model), total, strict=True):
            part[...] = value
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="bench.npz of make_data.py")
    parser.add_argument("--model", choices=["mlp", "alexnet"], required=True)
    parser.add_argument("--rounds", type=int, required=True, help="rounds trained, the first an untimed warm-up")
    parser.add_argument("--cohort", type=int, default=COHORT, help="devices in a round (fewer only to try the script)")
    args = parser.parse_args()

    context, size = mp.get_context("spawn"), sum(SIZES[args.model])
    params, sums = context.RawArray("f", size), [context.RawArray("f", size) for _ in range(WORKERS)]
    cohort, counter = context.RawArray("i", args.cohort), context.Value("i", 0)
    barrier = context.Barrier(WORKERS + 1, timeout=1800)
    rng, flat = np.random.default_rng(1), np.frombuffer(params, np.float32)
    weights = views(flat, args.model)
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        bound = np.prod(weight.shape[:-1]) ** -0.5  # as torch.nn does
        weight[...], bias[...] = rng.uniform(-bound, bound, weight.shape), rng.uniform(-bound, bound, bias.shape)
    workers = [
        context.Process(target=worker, args=(rank, barrier, args, params, sums, cohort, counter), daemon=True)
        for rank in range(WORKERS)
    ]
    for process in workers:
        process.start()

    seconds = []
    for _ in range(args.rounds):
        cohort[:] = rng.choice(DEVICES, args.cohort, replace=False).tolist()
        counter.value = 0
        start = time.perf_counter()
        barrier.wait()  # the workers begin
        barrier.wait()  # the workers are done
        flat[:] = sum(np.frombuffer(s, np.float32) for s in sums) / np.float32(args.cohort)
        seconds.append(time.perf_counter() - start)
    for process in workers:
        process.join()
    with np.load(args.data) as file:
        x_test, y_test = file["x_test"], file["y_test"]
    predict = jax.jit(lambda x: FORWARD[args.model](tuple(weights), x).argmax(1))
    hits = sum(int((predict(x_test[i : i + 500]) == y_test[i : i + 500]).sum()) for i in range(0, len(y_test), 500))
    print(
        json.dumps(
            {
                "name": "jax",
                "model": args.model,
                "seconds": [round(s, 4) for s in seconds[1:]],
                "accuracy": hits / len(y_test),
                "rounds": args.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
