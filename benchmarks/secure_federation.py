"""What a cycle costs a federation with secure aggregation and without, on this machine.

    FEDCLUSTER_DATA=... python benchmarks/secure_federation.py --devices 10 --model mlp

A server and all devices, with TLS and keys; every device is in every cycle and takes one step on MNIST (`mlp`) or on
CIFAR-10 (`alexnet`). The same devices serve both runs, one after the other. Seconds are those of cycles.jsonl, without
the first cycle, in which devices build their models; processor time is that of all processes, server and SuperLink
included. Both runs must end with the same model, bit for bit. Results are merged into results/secure_federation.json.
A device takes about 220 MB: 100 of them need a machine for themselves.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy import running, write_devices

import fedcluster
from fedcluster.flower import certificates
from fedcluster.flower.superlink import free_port

RESULTS = Path(__file__).parent / "results/secure_federation.json"
DATA = {"mlp": "mnist", "alexnet": "cifar10"}
US = [sys.executable, "-m", "fedcluster"]


def experiment(devices: int, model: str, cycles: int) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=cycles + 1,
        data={"name": DATA[model]},
        fleet={"devices": devices, "samples": 100},
        clusters={"count": 1, "participation": 1.0},
        model={"name": model},
        local={"steps": 1, "batch": 10, "lr": 0.01},
        eval={"every": cycles + 1},
    )


def processor_seconds() -> float:
    """Of all processes that this one has started, by their first ancestor below it."""
    total, parents = 0.0, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for number, (_, seconds) in parents.items():
        above = number
        while above in parents and above != os.getpid():
            above = parents[above][0]
        total += seconds * (above == os.getpid() and number != above)
    return total


def measure(folder: Path, server: str, name: str, wanted: fedcluster.Experiment, devices: int) -> dict[str, Any]:
    """One run with the devices that are there: seconds and processor seconds by cycle, and bytes."""
    (folder / f"{name}.toml").write_text(wanted.to_toml())
    words = ["serve", f"{name}.toml", "--listen", server, "--nodes", str(devices), "--out", name]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*US, *words, "--certificates", "certificates"], cwd=folder, stdout=log, stderr=log)
    lines, marks = folder / name / "cycles.jsonl", dict[int, float]()
    while process.poll() is None:
        count = len(lines.read_text().splitlines()) if lines.exists() else 0
        if count and count not in marks:
            marks[count] = processor_seconds()
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
    cycles = [json.loads(line) for line in lines.read_text().splitlines()]
    missing = sum(len(line["missing"]) for line in cycles)
    if missing:
        raise SystemExit(f"{name}: {missing} updates are missing: the machine is too busy for this")
    seconds = [round(line["seconds"], 3) for line in cycles][1:]
    last = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1])
    each = (marks[max(marks)] - marks[min(marks)]) / (max(marks) - min(marks))
    return {
        "seconds": seconds,
        "median": round(statistics.median(seconds), 3),
        "processor_seconds": round(each, 2),
        "upload_of_a_device": round(last["bytes_up"] / devices / len(cycles)),
        "download_of_a_device": round(last["bytes_down"] / devices / len(cycles)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--model", choices=sorted(DATA), default="mlp")
    parser.add_argument("--cycles", type=int, default=5)
    options = parser.parse_args()
    plain = experiment(options.devices, options.model, options.cycles)
    with TemporaryDirectory(prefix="secure-") as place:
        folder, server = Path(place), f"127.0.0.1:{free_port()}"
        certificates.make(folder / "certificates", options.devices, ["127.0.0.1"])
        write_devices(plain, folder)
        join = [*US, "join", "--server", server, "--certificates", "certificates"]
        nodes = {f"node-{k}": [*join, "--data", f"{k}.npz", "--device", str(k)] for k in range(options.devices)}
        with running(folder, nodes):
            found = {"plain": measure(folder, server, "plain", plain, options.devices)}
            secure = plain.override(privacy={"secure_aggregation": True})
            found["secure"] = measure(folder, server, "secure", secure, options.devices)
        models = [(folder / name / "model.safetensors").read_bytes() for name in found]
    if models[0] != models[1]:
        raise SystemExit("the two runs did not end with the same model")
    more = found["secure"]["median"] - found["plain"]["median"]
    times = found["secure"]["upload_of_a_device"] / found["plain"]["upload_of_a_device"]
    print(f"{options.model}, {options.devices} devices: {more:.2f} s a cycle more, uploads {times:.2f} times as large")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[f"{options.model}, {options.devices} devices"] = found | {
        "more_seconds": round(more, 3),
        "upload_times": round(times, 3),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
