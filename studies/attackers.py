"""Do small cohorts make a fleet easier to poison? Aggregation rules against attacks, with one cluster and with ten.

    FEDCLUSTER_DATA=... python studies/attackers.py            2 to 3 s of one core a run; resumes from its CSV

MNIST and the MLP on 100 devices of 500 samples, half of which take part in a round: 50 at once (M = 1), or five at a
time in ten clusters (M = 10). 10 steps of batch 20 at rate 0.1, 10 rounds. A fifth of the devices is malicious: two of
the ten in every cluster ("spread"), or all devices of two clusters ("concentrated"). Every rule is set to bear three
tenths of a cohort: f and b are 15 of 50, and 1 of 5. Scores are those of the last model, on the first 2,000 test
pictures.

Writes docs/attackers/: results.csv (a line a run, as soon as it ends), accuracy.png, backdoor.png, and table.md, whose
content is the end of the README there. `--seeds` and `--extra` add runs.
"""

import argparse
import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import fedcluster
from fedcluster.data import sources
from fedcluster.errors import Diverged
from fedcluster.experiment import sections
from fedcluster.figures import canvas, save
from fedcluster.runs.metrics import Line
from fedcluster.runs.progress import Display, stages
from fedcluster.state import State

ROOT = Path(__file__).parent.parent
ROUNDS, SHARE, TEST = 10, 0.2, 2000
RHOS = (0.1, 0.5, 0.9)
RULES = ("mean", "median", "trimmed_mean", "multi_krum", "geometric_median", "norm_clip", "krum")
BUCKETS = {"median, buckets of 2": "median"}
SMALL = {"multi_krum, m = 2": "multi_krum"}  # of five, in place of the default, c - f = 4
BOUNDED = {"mean, cycle bound": "mean", "multi_krum, cycle bound": "multi_krum"}
ROWS = (*RULES, *BUCKETS, *SMALL, *BOUNDED)
SETTINGS = {"M = 1": (1, "spread"), "M = 10, spread": (10, "spread"), "M = 10, concentrated": (10, "concentrated")}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign_flip": {"scale": 3.0},
    "replacement": {},
    "little_is_enough": {},
}
EXTRA: dict[str, dict[str, Any]] = {"label_flip": {}, "gaussian": {}, "inner_product": {}, "backdoor": {}}
OWN: dict[str, dict[str, Any]] = {"median, buckets of 2": {"bucketing": 2}, "multi_krum, m = 2": {"m": 2}}
COLUMNS = ("test_accuracy", "backdoor_success", "malicious_discarded", "honest_discarded")


class Cell(NamedTuple):
    rule: str
    attack: str
    setting: str
    rho: float
    seed: int


Results = dict[Cell, dict[str, float | None]]


def cells(seeds: int, extra: bool) -> Iterator[Cell]:
    """All runs. Without an attack nobody is concentrated; what is for small cohorts and for captured clusters has no
    M = 1. The other attacks are at rho_device = 0.5 and the first seed only."""
    for seed in range(seeds):
        for rho, attack, setting in product((0.5, 0.9, 0.1), ATTACKS, SETTINGS):
            if attack != "none" or not setting.endswith("concentrated"):
                rows = (*RULES, *BUCKETS) if setting == "M = 1" else ROWS
                yield from (Cell(rule, attack, setting, rho, seed) for rule in rows)
        if extra and seed == 0:
            for attack, setting, rule in product(EXTRA, SETTINGS, RULES):
                yield Cell(rule, attack, setting, 0.5, seed)


def experiment(cell: Cell, data: fedcluster.Dataset) -> fedcluster.Experiment:
    count, placement = SETTINGS[cell.setting]
    cohort = 50 // count
    borne = 3 * cohort // 10
    name = (BUCKETS | SMALL | BOUNDED).get(cell.rule, cell.rule)
    options: dict[str, dict[str, Any]] = {
        "trimmed_mean": {"beta": 0.3},
        "krum": {"f": borne},
        "multi_krum": {"f": borne},
    }
    attack: dict[str, Any] = {"name": cell.attack, "share": SHARE, "placement": placement}
    return fedcluster.Experiment(
        seed=cell.seed,
        rounds=ROUNDS,
        data={"name": data},
        fleet={"devices": 100, "samples": 500, "rho_device": cell.rho},
        clusters={"count": count, "participation": 0.5},
        model={"name": "mlp"},
        local={"steps": 10, "batch": 20, "lr": 0.1},
        aggregation={"name": name} | options.get(name, {}) | OWN.get(cell.rule, {}),
        accept={"cycle_bound": 3.0} if cell.rule in BOUNDED else {},
        attack=None if cell.attack == "none" else attack | (ATTACKS | EXTRA)[cell.attack],
    )


class Discarded(fedcluster.Callback):
    """Counts the updates of malicious and of honest devices, and those of each that a rule discarded or changed."""

    def __init__(self) -> None:
        self.sent, self.discarded = [0, 0], [0, 0]

    def on_cycle_end(self, line: Line, state: State) -> None:
        malicious, discarded = set(line.get("malicious", ())), {device for device, _ in line.get("discarded", ())}
        for device in line["cohort"]:
            self.sent[device in malicious] += 1
            self.discarded[device in malicious] += device in discarded

    def share(self, malicious: bool) -> float | None:
        return self.discarded[malicious] / self.sent[malicious] if self.sent[malicious] else None


def measure(cell: Cell, data: fedcluster.Dataset) -> dict[str, float | None]:
    counts = Discarded()
    try:
        last = fedcluster.run(experiment(cell, data), display=Display(), callbacks=[counts]).history[-1]
    except Diverged:
        last = {}
    shares = {"malicious_discarded": counts.share(True), "honest_discarded": counts.share(False)}
    return {"test_accuracy": last.get("test_accuracy"), "backdoor_success": last.get("backdoor_success")} | shares


def mnist() -> fedcluster.Dataset:
    data = sources.open_dataset(sections.Data(name="mnist"))
    return data.with_fields(x_test=data.x_test[:TEST], y_test=data.y_test[:TEST])


def read(path: Path) -> Results:
    """The runs that have been made."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            Cell(row["rule"], row["attack"], row["setting"], float(row["rho_device"]), int(row["seed"])): {
                column: float(row[column]) if row[column] else None for column in COLUMNS
            }
            for row in csv.DictReader(file)
        }


def append(path: Path, cell: Cell, found: dict[str, float | None]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["rule", "attack", "setting", "rho_device", "seed", *COLUMNS])
        writer.writerow([*cell, *("" if found[name] is None else round(found[name], 4) for name in COLUMNS)])  # type: ignore[arg-type]


def values(results: Results, column: str, **wanted: Any) -> list[float]:
    """The values of a column in these cells. A run that diverged has an accuracy of 0, and no other score."""
    rows = [found for cell, found in results.items() if all(getattr(cell, key) == one for key, one in wanted.items())]
    return [found[column] or 0.0 for found in rows if column == "test_accuracy" or found[column] is not None]


def text(found: list[float]) -> str:
    """The mean in per cent, with the lowest and highest value where there are several."""
    if not found:
        return ""
    low, mean, high = (f"{100 * value:.0f}" for value in (min(found), fmean(found), max(found)))
    spread = "" if low == high else f" ({low}-{high})"
    return mean + spread


def table(results: Results) -> str:
    """A table an attack and score: a row a rule, a column for each setting and rho_device."""
    made = {cell.attack for cell in results}
    wanted = [(attack, "test_accuracy") for attack in (*ATTACKS, *EXTRA) if attack in made]
    wanted += [(attack, "backdoor_success") for attack in ("replacement", "backdoor") if attack in made]
    parts = []
    for attack, column in wanted:
        heads = sorted({(cell.setting, cell.rho) for cell in results if cell.attack == attack}, key=place)
        parts += [f"**{attack}**: {column.replace('_', ' ')}, per cent", ""]
        parts += ["| rule | " + " | ".join(f"{setting}: {rho:g}" for setting, rho in heads) + " |"]
        parts += ["| --- |" + " --- |" * len(heads)]
        for rule in ROWS:
            row = [text(values(results, column, attack=attack, rule=rule, setting=s, rho=r)) for s, r in heads]
            if any(row):
                parts.append(f"| {rule} | " + " | ".join(row) + " |")
        parts.append("")
    return "\n".join(parts)


def place(head: tuple[str, float]) -> tuple[int, float]:
    return list(SETTINGS).index(head[0]), head[1]


def picture(results: Results, column: str, attacks: list[str], label: str, path: Path) -> None:
    """A panel an attack and rho_device, a dot a rule and setting, a bar from the lowest to the highest seed."""
    styles = {"M = 1": ("#5A5A5A", "o"), "M = 10, spread": ("#0072B2", "s"), "M = 10, concentrated": ("#D55E00", "^")}
    panels = [(attack, rho) for attack in attacks for rho in RHOS]
    figure, axes = canvas(len(RHOS), 11, 3.1 * len(attacks) + 0.6, rows=len(attacks))
    for ax, (attack, rho) in zip(axes, panels, strict=True):
        for shift, (setting, (colour, marker)) in enumerate(styles.items()):
            for y, rule in enumerate(ROWS):
                found = [
                    100 * one for one in values(results, column, attack=attack, rule=rule, setting=setting, rho=rho)
                ]
                if found:
                    at = y + 0.22 * (shift - 1)
                    ax.plot([min(found), max(found)], [at, at], color=colour, lw=1.5)
                    ax.plot(fmean(found), at, marker, color=colour, ms=5)
        ax.set(title=f"{attack}, rho_device = {rho:g}", xlim=(-3, 103), xlabel=label)
        ax.set_yticks(range(len(ROWS)), ROWS if rho == RHOS[0] else [""] * len(ROWS))
        ax.invert_yaxis()
        ax.grid(alpha=0.25, axis="x")
    for setting, (colour, marker) in styles.items():
        axes[0].plot([], [], marker, color=colour, label=setting)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "attackers")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--extra", action="store_true", help="the other attacks, at rho_device = 0.5")
    parser.add_argument("--draw", action="store_true", help="draw and tabulate what there is, without more runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.csv"
    results = read(path)
    wanted = [] if arguments.draw else list(cells(arguments.seeds, arguments.extra))
    left = [cell for cell in wanted if cell not in results]
    if left:
        data = mnist()
        with stages() as progress:
            for number, cell in enumerate(left):
                progress("attackers", len(wanted) - len(left) + number, len(wanted))
                results[cell] = measure(cell, data)
                append(path, cell, results[cell])
    (arguments.out / "table.md").write_text(table(results))
    drawn = [attack for attack in ATTACKS if {cell.rho for cell in results if cell.attack == attack} == set(RHOS)]
    picture(results, "test_accuracy", drawn, "test accuracy (%)", arguments.out / "accuracy.png")
    picture(
        results,
        "backdoor_success",
        ["replacement"],
        "triggered pictures taken for a 0 (%)",
        arguments.out / "backdoor.png",
    )


if __name__ == "__main__":
    main()
