"""Folders as runs leave them, written by hand: of any size, and hostile."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w


def write_run(folder: Path, rounds: int = 12, clusters: int = 4, seed: int = 0, **keys: Any) -> Path:
    """A finished run. Its curves are noise around a falling loss, drawn from its seed."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    experiment = {"rounds": rounds, "seed": seed, "local": {"steps": 5, "lr": 0.1}, "clusters": {"count": clusters}}
    (folder / "experiment.toml").write_text(tomli_w.dumps(experiment | keys))
    start = {"train_loss": 2.3, "test_loss": 2.31, "test_accuracy": 0.1}
    facts = {"start": start, "fedcluster": "0.2.0", "torch": "2", "precision": "float32", "cohorts": "sequential"}
    (folder / "run.json").write_text(json.dumps(facts))
    loss = 2.3 * np.exp(-np.arange(1, rounds + 1) / rounds * 3) * rng.uniform(0.9, 1.1, rounds)
    lines, cycles = [], []
    for j in range(1, rounds + 1):
        for K in range(clusters):
            late = [int(rng.integers(40))] if rng.random() < 0.05 else []
            cycles.append(cycle_line(j, K, float(rng.uniform(0.1, 1)), float(rng.uniform(-1, 1)), late))
        scores = {"train_loss": loss[j - 1], "test_loss": loss[j - 1] * 1.1, "test_accuracy": 1 - loss[j - 1] / 2.5}
        counts = {"aggregations": j * clusters, "device_updates": 40 * j, "downloads": 40 * j, "uploads": 40 * j}
        sent = {"bytes_down": 160_000 * j, "bytes_up": 160_000 * j, "refused": 0}
        lines.append({"round": j, **scores, **counts, **sent, "seconds": 0.1, "elapsed": 0.12 * j + rng.random() / 100})
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "cycles.jsonl", cycles)
    rows = [{"devices": 10, "samples": 100, "weight": 1 / clusters} for _ in range(clusters)]
    shares = [[0.7, 0.3] for _ in range(clusters)]
    shown = [{"device": k, "cluster": k % clusters, "shares": [1.0, 0.0]} for k in range(8)]
    size = {"devices": 10 * clusters, "sampled": 40, "left_out": 0, "samples": {"least": 10, "mean": 10.0, "most": 10}}
    fleet = {**size, "clusters": rows, "class_shares": shares, "shown": shown}
    (folder / "fleet.json").write_text(json.dumps(fleet))
    (folder / "model.safetensors").touch()
    return folder


def cycle_line(j: int, K: int, moved: float, cosine: float, late: list[int]) -> dict[str, Any]:
    line = {"round": j, "cycle": K, "cluster": K, "cohort": list(range(10)), "changed": True, "moved": moved}
    return line | {"cosine": cosine, "refused": 0, "reasons": [], "missing": late, "seconds": 0.02}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def data_of_page(html: str) -> Any:
    """The data of a page, as its scripts read them."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert text
    return json.loads(text[1])


def data_in(page: Path) -> Any:
    return data_of_page(page.read_text())
