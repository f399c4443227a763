"""What a cycle of a federation costs beyond training: eight devices on this machine, the MLP on MNIST.

    python benchmarks/deploy.py            # ours: serve and join, with TLS and keys
    python benchmarks/deploy.py --stock    # and stock Flower's FedAvg loop beside it, without TLS

A cycle of ours and a round of stock Flower do the same: a cohort of two downloads the model, takes 20 steps on batches
of 30 and uploads. The nodes' own training is timed in one process of the same machine and taken off.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedcluster
from fedcluster import fleet, prepare, sources
from fedcluster.display import Display
from fedcluster.executor import InProcess
from fedcluster.flower import certificates
from fedcluster.flower.superlink import QUIET, free_port

EXPERIMENT = fedcluster.Experiment(
    rounds=5,
    data={"name": "mnist"},
    fleet={"devices": 8, "samples": 500},
    clusters={"count": 4, "participation": 1.0},
    model={"name": "mlp"},
)
SCRIPTS = Path(sys.executable).parent


@contextmanager
def running(folder: Path, commands: dict[str, list[str]], **environment: str) -> Iterator[None]:
    """Processes, each with a log of its own, ended at the end."""
    started = []
    for name, words in commands.items():
        with (folder / f"{name}.log").open("wb") as log:
            env = os.environ | QUIET | {"OMP_NUM_THREADS": "1"} | environment
            started.append(subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log))
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def write_devices(folder: Path) -> None:
    dataset = sources.open_dataset(EXPERIMENT.data.name)
    everyone = fleet.build(EXPERIMENT.fleet, dataset, EXPERIMENT.seed)
    x, y = dataset.x_train.numpy(), dataset.y_train.numpy()
    for k in range(len(everyone)):
        rows = everyone.draw(k)
        np.savez(folder / f"{k}.npz", x_train=x[rows], y_train=y[rows], x_test=x[:1], y_test=y[:1])


def training() -> float:
    """Seconds that a cohort's own training takes, one device after the other in one process."""
    setup = prepare.prepare(EXPERIMENT, Display())
    assert isinstance(setup.executor, InProcess)
    cycle = setup.schedule.round(0)[0]
    sent = setup.algorithm.broadcast(setup.start)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        list(setup.executor.train(cycle, sent, 0, {}))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def ours(folder: Path) -> list[float]:
    certificates.make(folder / "certificates", 8, ["127.0.0.1"])
    (folder / "experiment.toml").write_text(EXPERIMENT.to_toml())
    server = f"127.0.0.1:{free_port()}"
    us = [sys.executable, "-m", "fedcluster"]
    common = ["--certificates", "certificates"]
    nodes = {
        f"node-{k}": [*us, "join", "--server", server, "--data", f"{k}.npz", "--device", str(k), *common]
        for k in range(8)
    }
    with running(folder, nodes):
        words = ["serve", "experiment.toml", "--listen", server, "--nodes", "8", "--out", "out", *common]
        subprocess.run([*us, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "out/cycles.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines][4:]  # the first round, in which devices build their models, left out


def stock(folder: Path, rounds: int) -> list[float]:
    """The loop of the documentation: SuperLink, SuperNodes and a run, polls as they come."""
    port = free_port()
    here = f"127.0.0.1:{port}"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{here}"\ninsecure = true\n'
    )
    link = [str(SCRIPTS / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    node = [str(SCRIPTS / "flower-supernode"), "--insecure", "--superlink", here]
    nodes = {
        f"supernode-{k}": [*node, "--port", str(free_port()), "--node-config", f'data="{folder / f"{k}.npz"}"']
        for k in range(8)
    }
    path = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "FLWR_HOME": str(folder)}
    with running(folder, {"superlink": link}, **path):
        time.sleep(10)
        with running(folder, nodes, **path):
            out = folder / "stock.json"
            config = f'rounds={rounds} out="{out}"'
            words = [str(SCRIPTS / "flwr"), "run", str(Path(__file__).parent / "stock"), "--run-config", config]
            subprocess.run(words, cwd=folder, env=os.environ | QUIET | path, check=True, stdout=subprocess.DEVNULL)
            until = time.monotonic() + 1800
            while not out.exists() and time.monotonic() < until:
                time.sleep(1)
            times: list[float] = json.loads(out.read_text())
            return times[1:]


def told(name: str, times: list[float], own: float) -> None:
    beyond = [seconds - own for seconds in times]
    print(
        f"{name}: a cycle takes {statistics.median(times):.2f} s in the median ({min(times):.2f} to {max(times):.2f}, "
        f"{len(times)} of them), {statistics.median(beyond):.2f} s beyond training"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="stock Flower too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of stock Flower")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="deploy-") as place:
        folder = Path(place)
        write_devices(folder)
        own = training()
        print(
            f"a cohort of two trains for {own:.2f} s; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        told("fedcluster serve and join", ours(folder), own)
        if options.stock:
            told("stock Flower's FedAvg", stock(folder, options.rounds), own)


if __name__ == "__main__":
    main()
