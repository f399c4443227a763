"""Federated algorithms read from their papers once more, in NumPy and float64, on flat parameter vectors.

Shares no code with the package. W is the model a cluster receives, w a device's own, p_k a device's part of all
samples, share_k its part of the cluster's; g is the gradient of a batch, G that of all of a device's samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Gradient = Callable[[Array, Array, Index, float], Array]  # (w, x, y, beta), of the mean loss
Direction = Callable[[int, Array, Index], Array]  # (device, w, batch): what a local step uses in place of g
Memory = dict[Any, Any]  # what server and devices keep between cycles: the server's by name, a device's by number


@dataclass
class Problem:
    """Clusters take turns in the order given, everybody takes part."""

    x: list[Array]
    y: list[Index]
    clusters: list[list[int]]
    rounds: int
    start: Array
    gradient: Gradient
    batches: Callable[[int, int, int], list[Index]]  # (round, cycle, device): one batch for each local step


# Models


def softmax(scores: Array) -> Array:
    q: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    return q


def softmax_regression(w: Array, x: Array, y: Index, beta: float = 0.0) -> Array:
    """Parameters: weight [classes, features], bias [classes]. What enters its last layer is x itself, which no
    parameter changes: `beta` does nothing."""
    features = x.shape[1]
    classes = w.size // (features + 1)
    weight, bias = w[: classes * features].reshape(classes, features), w[classes * features :]
    residual = (softmax(x @ weight.T + bias) - np.eye(classes)[y]) / len(y)
    return np.concatenate([(residual.T @ x).ravel(), residual.sum(axis=0)])


def relu_network(hidden: int) -> Gradient:
    """Parameters: weight1 [hidden, features], bias1 [hidden], weight2 [classes, hidden], bias2 [classes].

    FedMAX's penalty is beta * mean_i sum_j q_ij log q_ij, where q_i = softmax(a_i) and a_i is the hidden layer.
    """

    def gradient(w: Array, x: Array, y: Index, beta: float = 0.0) -> Array:
        features = x.shape[1]
        classes = (w.size - hidden * (features + 1)) // (hidden + 1)
        sizes = [hidden * features, hidden, classes * hidden]
        weight1, bias1, weight2, bias2 = np.split(w, np.cumsum(sizes))
        weight1, weight2 = weight1.reshape(hidden, features), weight2.reshape(classes, hidden)

        a = np.maximum(x @ weight1.T + bias1, 0)
        residual = (softmax(a @ weight2.T + bias2) - np.eye(classes)[y]) / len(y)
        q = softmax(a)
        log_q = a - a.max(axis=1, keepdims=True)
        log_q = log_q - np.log(np.exp(log_q).sum(axis=1, keepdims=True))
        penalty = q * (log_q - (q * log_q).sum(axis=1, keepdims=True)) / len(y)
        back = (residual @ weight2 + beta * penalty) * (a > 0)
        return np.concatenate([(back.T @ x).ravel(), back.sum(axis=0), (residual.T @ a).ravel(), residual.sum(axis=0)])

    return gradient


# One cluster's turn


class Turn:
    def __init__(self, problem: Problem, options: dict[str, Any], round_: int, cycle: int, W: Array) -> None:
        self.problem, self.options, self.cycle, self.W = problem, options, cycle, W
        self.cohort = problem.clusters[cycle]
        self.eta = float(options["lr"])
        total = sum(len(y) for y in problem.y)
        self.p = {k: len(problem.y[k]) / total for k in self.cohort}
        self.share = {k: self.p[k] / sum(self.p.values()) for k in self.cohort}
        self.batches = {k: problem.batches(round_, cycle, k) for k in self.cohort}

    def g(self, k: int, w: Array, batch: Index, beta: float = 0.0) -> Array:
        return self.problem.gradient(w, self.problem.x[k][batch], self.problem.y[k][batch], beta)

    def G(self, k: int, w: Array) -> Array:
        return self.problem.gradient(w, self.problem.x[k], self.problem.y[k], 0.0)

    def average(self, vectors: Mapping[int, Array]) -> Array:
        return sum((self.share[k] * vectors[k] for k in self.cohort), np.zeros_like(self.W))

    def gradient_at_W(self) -> Array:
        return self.average({k: self.G(k, self.W) for k in self.cohort})

    def train(self, direction: Direction, optimizer: str | None = None) -> dict[int, Array]:
        """Every device's w after its local steps; the optimizer begins anew in each cycle."""
        kind = optimizer or self.options["optimizer"]
        return {k: self.descend(k, direction, kind) for k in self.cohort}

    def descend(self, k: int, direction: Direction, kind: str) -> Array:
        w, m, v = self.W, np.zeros_like(self.W), np.zeros_like(self.W)
        for t, batch in enumerate(self.batches[k], start=1):
            d = direction(k, w, batch)
            if self.options["clip_norm"] is not None:
                d = d * min(1.0, self.options["clip_norm"] / np.linalg.norm(d))
            if kind == "sgd":
                w = w - self.eta * d
            elif kind == "momentum":
                m = self.options["momentum"] * m + d
                w = w - self.eta * m
                if self.options["nesterov"]:
                    w = w + self.eta * (m - d - self.options["momentum"] * m)
            elif kind in ("adam", "adamw"):
                b1, b2 = self.options["betas"]
                if kind == "adamw":
                    w = w - self.eta * self.options["weight_decay"] * w
                m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
                w = w - self.eta * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + self.options["eps"])
            else:
                raise ValueError(kind)
        return w


# Algorithms: from one turn to the combined model


def fedavg(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """McMahan et al. 2017."""
    return turn.average(turn.train(turn.g))


def fedprox(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Li et al. 2020: loss + mu/2 |w - W|^2."""
    mu: float = options["mu"]
    return turn.average(turn.train(lambda k, w, batch: turn.g(k, w, batch) + mu * (w - turn.W)))


def scaffold(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Karimireddy et al. 2020."""
    zero = np.zeros_like(turn.W)
    if options["reset"] == "round" and turn.cycle == 0:
        memory.clear()
    c: Array = memory.get("c", zero)
    c_k: dict[int, Array] = {k: memory.get(k, zero) for k in turn.cohort}
    w_k = turn.train(lambda k, w, batch: turn.g(k, w, batch) - c_k[k] + c)
    memory["c"] = c
    for k in turn.cohort:
        if options["option"] == "I":
            new = turn.G(k, turn.W)
        else:
            new = c_k[k] - c + (turn.W - w_k[k]) / (len(turn.batches[k]) * turn.eta)
        memory["c"] = memory["c"] + turn.p[k] * (new - c_k[k])
        memory[k] = new
    return turn.average(w_k)


def fednova(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Wang et al. 2020: momentum applies the gradient of step t (of tau) 1 + mu + ... + mu^(tau-t) times; a_k is the
    sum of these, tau itself for SGD. It is how far the optimizer goes along a gradient of 1."""
    mu: float = {"sgd": 0.0, "momentum": options.get("momentum", 0.0)}[options["optimizer"]]
    tau = {k: len(turn.batches[k]) for k in turn.cohort}
    a = {k: (tau[k] - mu * (1 - mu ** tau[k]) / (1 - mu)) / (1 - mu) for k in turn.cohort}
    if options["nesterov"]:
        for k in turn.cohort:
            a[k], m = 0.0, 0.0
            for _ in range(tau[k]):
                m = mu * m + 1
                a[k] += 1 + mu * m
    tau_eff = sum(turn.share[k] * a[k] for k in turn.cohort)
    w_k = turn.train(turn.g)
    return turn.W + tau_eff * turn.average({k: (w_k[k] - turn.W) / a[k] for k in turn.cohort})


def mime(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Karimireddy et al. 2021: local steps with the server's statistics s, which do not move meanwhile."""
    c = turn.gradient_at_W()
    return mime_steps(turn, options, memory, c, lambda k, w, b: turn.g(k, w, b) - turn.g(k, turn.W, b) + c)


def mimelite(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Karimireddy et al. 2021: Mime without the correction of the local gradient."""
    return mime_steps(turn, options, memory, turn.gradient_at_W(), turn.g)


def mime_steps(turn: Turn, options: dict[str, Any], memory: Memory, G: Array, d: Direction) -> Array:
    kind = options["optimizer"]
    s = memory or {"m": np.zeros_like(turn.W), "v": np.zeros_like(turn.W), "t": 0}

    def V(s: Memory, d: Array) -> Memory:
        if kind == "momentum":
            b = options["momentum"]
            return {"m": (1 - b) * d + b * s["m"], "v": s["v"], "t": s["t"] + 1}
        if kind == "adam":
            b1, b2 = options["betas"]
            m, v = b1 * s["m"] + (1 - b1) * d, b2 * s["v"] + (1 - b2) * d**2
            return {"m": m, "v": v, "t": s["t"] + 1}
        return s

    def U(d: Array) -> Array:
        if kind == "adam" and options["statistics"] == "fixed":
            b1 = options["betas"][0]
            step: Array = ((1 - b1) * d + b1 * s["m"]) / (np.sqrt(s["v"]) + options["eps"])
            return step
        after = V(s, d)  # used for this step, then forgotten
        m: Array = after["m"]
        if kind == "momentum":
            return m
        if kind == "adam":
            (b1, b2), t = options["betas"], after["t"]
            v: Array = after["v"]
            d = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + options["eps"])
        return d

    w_k = turn.train(lambda k, w, batch: U(d(k, w, batch)), optimizer="sgd")
    memory.update(V(s, G))
    return turn.average(w_k)


def fedmax(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Chen, Bhardwaj and Marculescu 2020: the penalty is the model's (`relu_network`)."""
    beta: float = options["beta"]
    return turn.average(turn.train(lambda k, w, batch: turn.g(k, w, batch, beta)))


def fedl(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Dinh et al. 2021. Without a server's gradient yet, steps are plain."""
    tilt = {k: options["eta"] * memory["F"] - turn.G(k, turn.W) if "F" in memory else 0.0 for k in turn.cohort}
    w_k = turn.train(lambda k, w, batch: turn.g(k, w, batch) + tilt[k])
    memory["F"] = turn.average({k: turn.G(k, w_k[k]) for k in turn.cohort})
    return turn.average(w_k)


def vrl_sgd(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Liang et al. 2019, where all devices take as many steps. With unequal numbers a movement counts by the step, and
    what is taken off is the average of just that, so that the drifts of a cohort keep their sum."""
    D: dict[int, Array] = {k: memory.get(k, np.zeros_like(turn.W)) for k in turn.cohort}
    w_k = turn.train(lambda k, w, batch: turn.g(k, w, batch) - D[k], optimizer="sgd")
    pull = {k: (turn.W - w_k[k]) / (len(turn.batches[k]) * turn.eta) for k in turn.cohort}
    mean = turn.average(pull)
    memory.update({k: D[k] + pull[k] - mean for k in turn.cohort})
    return turn.average(w_k)


def fedsvrg(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Konecny et al. 2016."""
    c = turn.gradient_at_W()
    return turn.average(turn.train(lambda k, w, b: turn.g(k, w, b) - turn.g(k, turn.W, b) + c))


def pr_spider(turn: Turn, options: dict[str, Any], memory: Memory) -> Array:
    """Sharma et al. 2019: the first step is the cohort's, its batch is not used; SPIDER follows it from there."""
    v_0 = turn.gradient_at_W()
    w_k = {}
    for k in turn.cohort:
        before, w, v = turn.W, turn.W - turn.eta * v_0, v_0
        for batch in turn.batches[k][1:]:
            v = turn.g(k, w, batch) - turn.g(k, before, batch) + v
            before, w = w, w - turn.eta * v
        w_k[k] = w
    return turn.average(w_k)


ALGORITHMS: dict[str, Callable[[Turn, dict[str, Any], Memory], Array]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "fednova": fednova,
    "mime": mime,
    "mimelite": mimelite,
    "fedmax": fedmax,
    "fedl": fedl,
    "vrl_sgd": vrl_sgd,
    "fedsvrg": fedsvrg,
    "pr_spider": pr_spider,
}


# The server


def serve(W: Array, combined: Array, server: dict[str, Any], memory: Memory) -> Array:
    """Hsu et al. 2019 (avgm) and Reddi et al. 2021 (the others)."""
    kind, lr, (b1, b2) = server["optimizer"], float(server["lr"]), server["betas"]
    delta = combined - W
    if kind == "none":
        return W + lr * delta
    m: Array = memory.get("m", np.zeros_like(W))
    if kind == "avgm":
        memory["m"] = m = b1 * m + delta
        return W + lr * m
    tau: float = server["tau"]
    v: Array = memory.get("v", np.full_like(W, tau**2))
    memory["m"] = m = b1 * m + (1 - b1) * delta
    memory["v"] = v = {
        "adagrad": v + delta**2,
        "adam": b2 * v + (1 - b2) * delta**2,
        "yogi": v - (1 - b2) * delta**2 * np.sign(v - delta**2),
    }[kind]
    return W + lr * m / (np.sqrt(v) + tau)


def simulate(problem: Problem, algorithm: str, options: dict[str, Any], server: dict[str, Any] | None = None) -> Array:
    W = problem.start
    memory: Memory = {}
    moments: Memory = {}
    for round_ in range(problem.rounds):
        for cycle in range(len(problem.clusters)):
            combined = ALGORITHMS[algorithm](Turn(problem, options, round_, cycle, W), options, memory)
            W = combined if server is None else serve(W, combined, server, moments)
    return W
