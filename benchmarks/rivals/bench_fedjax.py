"""FedJAX 0.0.17, its own federated_averaging over its for_each_client, compiled by XLA.

Configuration, for 2 cores: FedJAX's "pmap" backend on 2 XLA devices of the host, so that the jitted steps of two
clients run side by side; --backend jit is its plain backend, one client at a time with XLA's own threads, and was
slower in runs taken in turn (mlp a little, alexnet more). FedJAX 0.0.17 is the last release and does not run on
today's JAX (pmap fails on 0.10.2). Of the versions tried, 0.7.2 took the least CPU for a step of alexnet (0.4.35 and
0.8.3 to 0.10.2 took more) and none was better at mlp. It needs two settings of old: see tree_map and main.

Batches: FedJAX's own shuffled ones (without replacement, reshuffled when used up), exactly 20 of 30. A round is timed
around one call of the algorithm, until the new parameters are there; the per-client norms that FedJAX always computes
are part of it.
"""

import argparse
import json
import sys
import time

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # FedJAX calls it by this name, which JAX has dropped

import fedjax

DEVICES, COHORT, STEPS, BATCH, RATE, CLASSES = 1000, 100, 20, 30, 0.05, 10


def norm(x: jax.Array) -> jax.Array:
    """Local response normalisation over the channels: size 9, alpha 0.001, beta 0.75, k 1, as PyTorch defines it."""
    squares = jax.lax.reduce_window(x * x, 0.0, jax.lax.add, (1, 1, 1, 9), (1, 1, 1, 1), "SAME")
    return x / (1.0 + 0.001 / 9 * squares) ** 0.75


def mlp(x: jax.Array) -> jax.Array:
    return hk.nets.MLP([200, 200, CLASSES])(x)


def alexnet(x: jax.Array) -> jax.Array:
    x = x.reshape(-1, 28, 28, 1)
    for _ in range(2):
        x = norm(hk.max_pool(jax.nn.relu(hk.Conv2D(64, 5)(x)), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"))
    return hk.nets.MLP([384, 192, CLASSES])(x.reshape(-1, 3136))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="bench.npz of make_data.py")
    parser.add_argument("--model", choices=["mlp", "alexnet"], required=True)
    parser.add_argument("--rounds", type=int, required=True, help="rounds trained, the first not timed")
    parser.add_argument("--cohort", type=int, default=COHORT, help="devices in a round (fewer only to try the script)")
    parser.add_argument("--backend", choices=["pmap", "jit"], default="pmap")
    args = parser.parse_args()
    if args.backend == "pmap":
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_pmap_no_rank_reduction", False)  # FedJAX takes a device's part to have no device axis
    fedjax.set_for_each_client_backend(args.backend)

    with np.load(args.data) as file:
        data = {name: file[name] for name in file.files}
    clients = [
        fedjax.ClientDataset({"x": data["x_train"][rows], "y": data["y_train"][rows].astype(np.int32)})
        for rows in data["rows"]
    ]
    net = hk.without_apply_rng(hk.transform(mlp if args.model == "mlp" else alexnet))

    def loss(params: hk.Params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(net.apply(params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=1))

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        client_optimizer=fedjax.optimizers.sgd(RATE),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=STEPS),
    )
    state = algorithm.init(net.init(jax.random.PRNGKey(0), jnp.zeros((1, 784))))
    rng, seconds = np.random.default_rng(1), []
    for round_ in range(1, args.rounds + 1):
        begun = time.perf_counter()
        cohort = rng.choice(DEVICES, args.cohort, replace=False).tolist()
        keys = jax.random.split(jax.random.PRNGKey(round_), args.cohort)
        state, _ = algorithm.apply(state, [(k, clients[k], key) for k, key in zip(cohort, keys, strict=True)])
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - begun)
        print(f"round {round_}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)

    predict = jax.jit(lambda x: net.apply(state.params, x).argmax(axis=1))
    answers = np.concatenate([predict(x) for x in np.split(data["x_test"], 20)])
    line = {
        "name": "fedjax",
        "model": args.model,
        "seconds": [round(s, 4) for s in seconds[1:]],
        "accuracy": round(float((answers == data["y_test"]).mean()), 4),
        "rounds": len(seconds),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
