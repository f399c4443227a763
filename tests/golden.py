"""Golden runs: small runs of every algorithm and executor whose results must not change by accident.

    python -m tests.golden --write           after a change that is meant to change numbers
    python -m tests.golden --write FILE      the digests of this machine, before a change that must not
    python -m tests.golden [--check FILE]    compare with FILE, or with tests/golden.json

The file holds the last training loss of every run and the digest of its model. Losses are compared on every machine, to
1e-3; digests only on the kind of processor that wrote them, because processors round differently.
"""

import json
import platform
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedcluster
from fedcluster.runs.progress import Display

FILE = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-3  # of a loss, relative

BASE: dict[str, Any] = {
    "rounds": 3,
    "fleet": {"devices": 24, "samples": 40, "rho_device": 0.9},
    "clusters": {"count": 3, "participation": 0.5},
    "model": {"name": "mlp"},
    "local": {"steps": 5, "batch": 10, "lr": 0.05},
}


class Network(nn.Module):
    """A model that only torch trains: dropout, batch normalisation and a skip connection."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.first, self.norm = nn.Linear(size, 32), nn.BatchNorm1d(32)
        self.second, self.last = nn.Linear(32, 32), nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x.flatten(1))))
        scores: torch.Tensor = self.last(h + nn.functional.dropout(self.second(h), 0.2, self.training))
        return scores


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Every run: the sections that differ from BASE, and options of `fedcluster.run`."""
    local = BASE["local"]
    algorithms = ("fedprox", "scaffold", "mime", "mimelite", "fedmax", "fedl", "vrl_sgd", "fedsvrg", "pr_spider")
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "fedavg": ({}, {}),
        "fedavg, one cluster": ({"clusters": {"count": 1, "participation": 0.5}}, {}),
        "fedavg, momentum": ({"local": local | {"optimizer": "momentum"}}, {}),
        "fedavg, adam": ({"local": local | {"optimizer": "adam", "lr": 0.01}}, {}),
        "fednova": ({"local": local | {"algorithm": "fednova", "steps": [2, 8]}}, {}),
        "centralized": ({"method": "centralized"}, {}),
        "cnn": ({"model": {"name": "cnn"}}, {}),
        "torch module": ({"model": {"name": Network}}, {}),
        "clock": ({"fleet": BASE["fleet"] | {"world": "diurnal"}, "clock": {"dropout": 0.2}}, {}),
        "balanced clusters": ({"clusters": {"method": "balanced", "count": 3, "participation": 0.5}}, {}),
        "two workers": ({}, {"workers": 2}),
        "stacked": ({}, {"cohorts": "stacked"}),
    }
    found |= {name: ({"local": local | {"algorithm": name}}, {}) for name in algorithms}
    found |= {f"server {name}": ({"server": {"optimizer": name, "lr": 0.1}}, {}) for name in ("avgm", "adam", "yogi")}
    return found


def outcome(keys: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    result = fedcluster.run(fedcluster.Experiment(**BASE | keys), display=Display(), **options)
    digest = sha256()
    for name, tensor in sorted(result.model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return {"loss": result.history[-1]["train_loss"], "digest": digest.hexdigest()[:16]}


def processor() -> str:
    """The kind of processor, by the instructions that decide how sums are rounded."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is not as it was, a line each."""
    same_machine = (golden["processor"], golden["torch"]) == (processor(), torch.__version__)
    said = [f"{name}: only on one side" for name in sorted(golden["runs"].keys() ^ found.keys())]
    for name in golden["runs"].keys() & found.keys():
        before, now = golden["runs"][name], found[name]
        if abs(before["loss"] - now["loss"]) > TOLERANCE * abs(before["loss"]):
            said.append(f"{name}: the loss is {now['loss']:.6g}, and was {before['loss']:.6g}")
        elif same_machine and before["digest"] != now["digest"]:
            said.append(f"{name}: the same loss, and other bits")
    return sorted(said)


def main() -> None:
    command, file = sys.argv[1] if len(sys.argv) > 1 else "--check", Path(sys.argv[2]) if len(sys.argv) > 2 else FILE
    found = {name: outcome(*case) for name, case in cases().items()}
    if command == "--write":
        about = {"processor": processor(), "torch": torch.__version__, "runs": found}
        file.write_text(json.dumps(about, indent=1) + "\n")
        return
    said = differences(json.loads(file.read_text()), found)
    print("\n".join(said) or f"{len(found)} golden runs are as they were")
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
