"""What a cycle of a federation costs beyond training: eight devices on this machine, the MLP on MNIST.

    python benchmarks/deploy.py            # ours: serve and join, with TLS and keys
    python benchmarks/deploy.py --stock    # and stock Flower's FedAvg loop beside it, without TLS
    python benchmarks/deploy.py --ray      # and our app in Flower's simulation (needs flwr[simulation])

Our cycle and stock Flower's round do the same work: a cohort of two downloads the model, takes 20 steps on batches of
30 and uploads. The devices' own training is timed in one process on the same machine and subtracted. Results are merged
into results/deploy.json.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedcluster
from fedcluster.data import sources
from fedcluster.fleet import fleet
from fedcluster.flower import certificates
from fedcluster.flower.superlink import QUIET, free_port
from fedcluster.runs.progress import Display
from fedcluster.training import setup as prepare
from fedcluster.training.executors.in_process import InProcess

EXPERIMENT = fedcluster.Experiment(
    rounds=5,
    data={"name": "mnist"},
    fleet={"devices": 8, "samples": 500},
    clusters={"count": 4, "participation": 1.0},
    model={"name": "mlp"},
)
SCRIPTS = Path(sys.executable).parent
HERE = Path(__file__).parent
RESULTS = HERE / "results/deploy.json"


@contextmanager
def running(folder: Path, commands: dict[str, list[str]], **environment: str) -> Iterator[None]:
    """Processes with a log each, which end with the block."""
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


def write_devices(experiment: fedcluster.Experiment, folder: Path) -> None:
    """The samples of every device, in a file each."""
    dataset = sources.open_dataset(experiment.data)
    _, partition = fleet.build(experiment.fleet, dataset, experiment.seed)
    x, y = dataset.x_train.numpy(), dataset.y_train.numpy()
    for k in range(len(partition)):
        rows = partition.sample_indices(k)
        np.savez(folder / f"{k}.npz", x_train=x[rows], y_train=y[rows], x_test=x[:1], y_test=y[:1])


def training() -> float:
    """Seconds that a cohort trains, one device after another in one process."""
    setup = prepare.prepare(EXPERIMENT)
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
    return cycles(folder / "out")


@contextmanager
def superlink(folder: Path, *words: str) -> Iterator[dict[str, str]]:
    """Flower's SuperLink as documented; yields the environment in which other commands find it."""
    port = free_port()
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "FLWR_HOME": str(folder),
        "SUPERLINK": f"127.0.0.1:{port}",
    }
    link = [str(SCRIPTS / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port), *words]
    with running(folder, {"superlink": link}, **environment):
        until = time.monotonic() + 300
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.5)
        yield environment


def flwr_run(folder: Path, environment: dict[str, str], app: Path, config: str, done: Path, *words: str) -> None:
    """`flwr run`, which returns at once; the run has finished when `done` exists."""
    command = [str(SCRIPTS / "flwr"), "run", str(app), "--run-config", config, *words]
    subprocess.run(command, cwd=folder, env=os.environ | QUIET | environment, check=True, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 3600
    while not done.exists():
        if time.monotonic() > until:
            raise SystemExit(f"{app.name} has not finished: {(folder / 'superlink.log').read_text()[-3000:]}")
        time.sleep(1)


def stock(folder: Path, rounds: int) -> list[float]:
    """SuperLink, SuperNodes and a run as documented, with the default polling."""
    with superlink(folder) as environment:
        node = [str(SCRIPTS / "flower-supernode"), "--insecure", "--superlink", environment["SUPERLINK"]]
        nodes = {
            f"supernode-{k}": [*node, "--port", str(free_port()), "--node-config", f'data="{folder / f"{k}.npz"}"']
            for k in range(8)
        }
        with running(folder, nodes, **environment):
            out = folder / "stock.json"
            flwr_run(folder, environment, HERE / "stock", f'rounds={rounds} out="{out}"', out)
            times: list[float] = json.loads(out.read_text())
            return times[1:]


def on_ray(folder: Path) -> list[float]:
    """Our app in Flower's simulation on Ray, with the same experiment file."""
    (folder / "experiment.toml").write_text(EXPERIMENT.to_toml())
    out = folder / "ray"
    config = f'experiment="{folder / "experiment.toml"}" out="{out}" nodes=8'
    with superlink(folder, "--simulation") as environment:
        fleet = ("--federation-config", "num-supernodes=8 client-resources-num-cpus=1")
        flwr_run(
            folder, environment, Path(fedcluster.__file__).parent / "flower/app", config, out / "curves.png", *fleet
        )
    return cycles(out)


def simulator(folder: Path) -> list[float]:
    """The same experiment in our own simulator."""
    fedcluster.run(EXPERIMENT, folder / "simulator", display=Display())
    return cycles(folder / "simulator")


def cycles(out: Path) -> list[float]:
    """Seconds of every cycle after the first round, in which devices build their models."""
    lines = [json.loads(line) for line in (out / "cycles.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines][EXPERIMENT.clusters.count :]


def report(name: str, times: list[float], own: float) -> None:
    """Print the times, and merge them into the results."""
    median = statistics.median(times)
    print(
        f"{name}: a cycle takes {median:.2f} s in the median ({min(times):.2f} to {max(times):.2f}, "
        f"{len(times)} of them), {median - own:.2f} s beyond training",
        flush=True,
    )
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = {
        "seconds": [round(seconds, 3) for seconds in times],
        "median": round(median, 3),
        "beyond_training": round(median - own, 3),
        "training": round(own, 3),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="stock Flower too")
    parser.add_argument("--ray", action="store_true", help="our app in Flower's simulation too, and our own simulator")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of stock Flower")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="deploy-") as place:
        folder = Path(place)
        write_devices(EXPERIMENT, folder)
        own = training()
        report("fedcluster serve and join", ours(folder), own)
        if options.stock:
            report("stock Flower's FedAvg", stock(folder, options.rounds), own)
        if options.ray:
            report("fedcluster in Flower's simulation on Ray", on_ray(folder), own)
            report("fedcluster run", simulator(folder), own)


if __name__ == "__main__":
    main()
