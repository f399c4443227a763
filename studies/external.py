"""Our numbers beside somebody else's: Flower's niid_bench in its own setting, Shakespeare by role, flights by aircraft.

    FEDCLUSTER_DATA=... .venv/bin/python studies/external.py [niid_bench] [shakespeare] [flights] [--seeds 3]

niid_bench (see niid_bench.py) takes 50 rounds of about 9 seconds of one core for every algorithm, partition and seed.
`--data`, `--partitions`, `--algorithms`, `--seeds` and `--rounds` run a part. docs/external/niid_bench.csv has the
accuracy of every round: runs whose rounds it has are not run again, and others go on where they stopped, as long as
their folders are there. Writes niid_bench.csv, niid_bench.png and table.md as the runs go on. Shakespeare and
flights (see natural.py) write their tables and curves to folders beside these.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean

import natural
from niid_bench import ALGORITHMS, PARTITIONS, PUBLISHED, experiment
from running import run

from fedcluster.analysis.jobs import Job
from fedcluster.errors import Diverged
from fedcluster.figures import canvas, save
from fedcluster.runs.metrics import METRICS, read_lines
from fedcluster.training.executors.processes import cores

ROOT = Path(__file__).parent.parent
COLUMNS = ("data", "partition", "algorithm", "seed", "round", "test_accuracy")
PUBLISHED_ROUNDS = 50
Cell = tuple[str, str, str, int]  # data, partition, algorithm, seed
Curves = dict[Cell, list[float]]
"""The test accuracy after each round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("niid_bench", "shakespeare", "flights")
    parser.add_argument("parts", nargs="*", help="niid_bench, shakespeare, flights; left out, all")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "external")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "external")
    parser.add_argument("--data", default="mnist,cifar10")
    parser.add_argument("--partitions", default=",".join(PARTITIONS))
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=PUBLISHED_ROUNDS, help="of niid_bench")
    parser.add_argument("--workers", type=int, default=cores())
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: use {', '.join(parts)}")
    chosen = given.parts or parts
    if "niid_bench" in chosen:
        settings = (each.split(",") for each in (given.data, given.partitions, given.algorithms))
        cells = [
            (*setting, seed) for seed, *setting in product(range(given.seeds), *settings) if tuple(setting) in PUBLISHED
        ]
        compare_with_published(cells, given.rounds, given.runs, given.out, given.workers)
    if "shakespeare" in chosen:
        natural.shakespeare(given.runs, given.out, rounds=25, seeds=given.seeds)
    if "flights" in chosen:
        natural.flights(given.runs, given.out, rounds=20, seeds=given.seeds)


def compare_with_published(cells: Iterable[Cell], rounds: int, runs: Path, out: Path, workers: int) -> None:
    """Run what is not on record yet, and write the record and the table as runs end."""
    known = read(out / "niid_bench.csv")
    left = [cell for cell in cells if len(known.get(cell, [])) < rounds]
    jobs = {cell: Job(folder(cell), experiment(*cell, rounds)) for cell in left}

    def update() -> None:
        for cell in left:
            lines = read_lines(runs / folder(cell) / METRICS)
            if len(lines) > len(known.get(cell, [])):
                known[cell] = [line["test_accuracy"] for line in lines]
                write(known, out)

    for cell, lines in run(jobs, runs, "niid_bench", workers, update).items():
        if isinstance(lines, Diverged):
            print(f"{', '.join(map(str, cell))}: {lines}")
    update()
    write(known, out)
    print((out / "table.md").read_text())


def folder(cell: Cell) -> str:
    return "-".join(map(str, cell)).replace(" ", "-")


def read(path: Path) -> Curves:
    curves: Curves = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                cell = (row["data"], row["partition"], row["algorithm"], int(row["seed"]))
                curves.setdefault(cell, []).append(float(row["test_accuracy"]))
    return curves


def write(curves: Curves, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "niid_bench.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for cell in in_order(curves):
            writer.writerows([*cell, number, accuracy] for number, accuracy in enumerate(curves[cell], 1))
    (out / "table.md").write_text(table(curves))
    draw(curves, out / "niid_bench.png")


def in_order(curves: Curves) -> list[Cell]:
    """By setting, as the published table has them, then by seed."""
    settings = list(PUBLISHED)
    return sorted(curves, key=lambda cell: (settings.index(cell[:3]), cell[3]))


def seeds_of(curves: Mapping[Cell, list[float]], setting: tuple[str, str, str]) -> list[list[float]]:
    return [curve for cell, curve in sorted(curves.items()) if cell[:3] == setting]


def table(curves: Curves) -> str:
    """The best accuracy of each setting, published and ours, and of how many rounds and seeds ours is."""
    lines = [
        "| data | partition | algorithm | published, best of 50 rounds | ours, best so far | lowest to highest | seeds "
        "| rounds |",
        "| --- " * 8 + "|",
    ]
    for setting, (mean, deviation) in PUBLISHED.items():
        found = seeds_of(curves, setting)
        ours = "not run | | |"
        if found:
            best, rounds = [100 * max(curve) for curve in found], sorted({len(curve) for curve in found})
            spread = f"{min(best):.2f} to {max(best):.2f}" if len(best) > 1 else ""
            ours = (
                f"{fmean(best):.2f} | {spread} | {len(best)} | {' to '.join(map(str, {rounds[0]: 0, rounds[-1]: 0}))}"
            )
        lines.append(f"| {' | '.join(setting)} | {mean:.2f} ± {deviation:.2f} | {ours} |")
    return "\n".join(lines) + "\n"


def draw(curves: Curves, path: Path) -> None:
    """The curves of every data set and partition, and what was published as horizontal lines."""
    panels = list(dict.fromkeys(cell[:2] for cell in in_order(curves)))
    figure, axes = canvas(len(panels), 4.6 * len(panels), 3.6)
    for axis, (data, partition) in zip(axes, panels, strict=True):
        levels, lowest = [], 100.0
        for k, algorithm in enumerate(ALGORITHMS):
            setting, color = (data, partition, algorithm), f"C{k}"
            for seed, curve in enumerate(seeds_of(curves, setting)):
                percent = [100 * accuracy for accuracy in curve]
                axis.plot(range(1, len(curve) + 1), percent, color=color, label=None if seed else algorithm)
                levels.append(max(percent))
                lowest = min([lowest, *percent[5:]])
            levels.append(PUBLISHED[setting][0])
            axis.axhline(levels[-1], color=color, linestyle=":", linewidth=1)
        axis.set(title=f"{data}, {partition}", xlabel="round", ylabel="test accuracy, %", xlim=(0, PUBLISHED_ROUNDS))
        axis.set_ylim(max(lowest, min(levels) - 30) - 1, min(100, max(levels) + 1))
        axis.legend(title="dotted: published,\nbest of 50 rounds")
    save(figure, path)


if __name__ == "__main__":
    main()
