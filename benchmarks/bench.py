"""Ours and every rival, interleaved on one machine, several times over: a table, JSON and a picture.

    make bench                                   everything
    make bench ARGS="--models mlp --only torch,pfl"    a part of it

Each rival is a script of our own in `rivals/`, in the best configuration that we found for it, in an environment
of its own under `.bench/`. Each prints the seconds of its rounds (start-up, warm-up and evaluation left out) and
its accuracy, so that one can see that it learned. A ratio of two medians of one sitting says something; seconds of
different sittings do not, because machines are noisy.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
SPACE = HERE.parent / ".bench"
ROUNDS = {"mlp": 8, "alexnet": 2}
RIVALS: dict[str, tuple[str, list[str], tuple[str, ...]]] = {  # environment, script with options, models
    "torch": ("torch", ["bench_torch.py"], ("mlp", "alexnet")),
    "torch-default": ("torch", ["bench_torch.py", "--layout", "default"], ("alexnet",)),
    "vmap": ("torch", ["bench_vmap.py"], ("mlp",)),
    "jax": ("jax", ["bench_jax.py"], ("mlp", "alexnet")),
    "pfl": ("pfl", ["bench_pfl.py"], ("mlp", "alexnet")),
    "fedjax": ("fedjax", ["bench_fedjax.py"], ("mlp",)),
    "fedlab": ("fedlab", ["bench_fedlab.py"], ("mlp", "alexnet")),
    "flower": ("flower", ["bench_flower.py"], ("mlp", "alexnet")),
}
LABELS = {
    "fedcluster": "fedcluster",
    "torch": "hand-written torch, tuned",
    "torch-default": "hand-written torch, default layout",
    "vmap": "torch vmap",
    "jax": "hand-written JAX",
    "pfl": "pfl-research",
    "fedjax": "FedJAX",
    "fedlab": "FedLab",
    "flower": "Flower (Ray)",
}


def environment(name: str) -> Path:
    """A virtual environment with the rival's requirements, torch first where it is among them."""
    folder = SPACE / f"env-{name}"
    python = folder / "bin" / "python"
    requirements = HERE / "rivals" / f"requirements-{name}.txt"
    stamp = folder / "ready"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        print(f"setting up {name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        lines = requirements.read_text().split()
        for first in [line for line in lines if line.startswith("torch==")]:
            subprocess.run([*pip, first], check=True)
        subprocess.run([*pip, "-r", str(requirements)], check=True)
        stamp.write_text(requirements.read_text())
    return python


def measure(name: str, model: str, data: Path) -> dict[str, Any] | None:
    """One run of one contestant; None when it fails, which is said."""
    if name == "fedcluster":
        command = [sys.executable, str(HERE / "ours.py"), "--rounds", str(ROUNDS[model])]
    else:
        home, words, _ = RIVALS[name]
        command = [str(environment(home)), *words, "--rounds", str(ROUNDS[model])]
    print(f"{model}: {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--model", model, "--data", str(data)],
        cwd=HERE / "rivals",
        capture_output=True,
        text=True,
        env=os.environ | {"FLWR_TELEMETRY_ENABLED": "0"},
    )
    if done.returncode:
        print(f"  failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"  {median(result['seconds']):.3f} s a round, accuracy {result['accuracy']:.3f}, "
        f"{time.monotonic() - began:.0f} s in all",
        file=sys.stderr,
        flush=True,
    )
    return result


def table(runs: list[dict[str, Any]]) -> str:
    """Median seconds a round, lowest and highest, and how many times ours, as Markdown."""
    lines = ["| model | | seconds a round | lowest to highest | times ours | accuracy | after rounds |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for model in ROUNDS:
        rows = []
        for name in LABELS:
            mine = [run for run in runs if run["contestant"] == name and run["model"] == model]
            seconds = [s for run in mine for s in run["seconds"]]
            if seconds:
                rows.append((median(seconds), name, seconds, mine[-1]))
        ours = next((row[0] for row in rows if row[1] == "fedcluster"), None)
        for middle, name, seconds, last in sorted(rows, key=lambda row: row[0]):
            ratio = f"{middle / ours:.2f}" if ours else ""
            label = f"**{LABELS[name]}**" if name == "fedcluster" else LABELS[name]
            lines.append(
                f"| {model} | {label} | {middle:.3f} | {min(seconds):.3f} to {max(seconds):.3f} | {ratio} "
                f"| {last['accuracy']:.3f} | {last['rounds']} |"
            )
    return "\n".join(lines)


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    from fedcluster.figures import canvas, save

    models = [model for model in ROUNDS if any(run["model"] == model for run in runs)]
    figure, axes = canvas(len(models), 5.5 * len(models), 3.2)
    for ax, model in zip(axes, models, strict=True):
        names = [name for name in LABELS if any(r["contestant"] == name and r["model"] == model for r in runs)]
        times = {
            name: [s for r in runs if r["contestant"] == name and r["model"] == model for s in r["seconds"]]
            for name in names
        }
        names.sort(key=lambda name: -median(times[name]))
        middles = [median(times[name]) for name in names]
        colours = ["#0072B2" if name == "fedcluster" else "#B0B0B0" for name in names]
        ax.barh([LABELS[name] for name in names], middles, color=colours)
        for y, (name, middle) in enumerate(zip(names, middles, strict=True)):
            ax.plot([min(times[name]), max(times[name])], [y, y], color="black", lw=1)
            ax.text(max(times[name]), y, f"  {middle:.2f}", va="center", fontsize=8)
        ax.set(title={"mlp": "MLP", "alexnet": "small AlexNet"}[model], xlabel="seconds a round")
        ax.margins(x=0.15)
    figure.suptitle("bars: median; lines: lowest to highest", fontsize=9)
    save(figure, path)


def machine() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,alexnet")
    parser.add_argument("--only", help="rivals, separated by commas; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="for mlp; alexnet runs once")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    SPACE.mkdir(exist_ok=True)
    data = SPACE / "bench.npz"
    if not data.exists():
        subprocess.run([sys.executable, str(HERE / "rivals" / "make_data.py"), "--out", str(data)], check=True)
    chosen = arguments.only.split(",") if arguments.only else list(RIVALS)
    models = arguments.models.split(",")
    runs = [run for run in earlier(arguments.out) if run["model"] not in models]
    for model in models:
        contestants = ["fedcluster", *(name for name in chosen if model in RIVALS[name][2])]
        for repeat in range(arguments.repeats if model == "mlp" else 1):
            for name in contestants:
                result = measure(name, model, data)
                if result is not None:
                    runs.append({"contestant": name, "repeat": repeat, "date": time.strftime("%Y-%m-%d"), **result})
                    write(runs, arguments.out)
    print(table(runs))


def earlier(out: Path) -> list[dict[str, Any]]:
    """The runs on record: a model that is not measured now keeps what it had."""
    try:
        found: list[dict[str, Any]] = json.loads((out / "bench.json").read_text())["runs"]
    except FileNotFoundError:
        return []
    return found


def write(runs: list[dict[str, Any]], out: Path) -> None:
    """After every run: what is measured is not lost when a later one fails."""
    out.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "runs": runs}
    (out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "bench.md").write_text(table(runs) + "\n")
    picture(runs, out / "bench.png")


if __name__ == "__main__":
    main()
