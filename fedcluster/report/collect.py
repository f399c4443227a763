"""What a report shows of a run, read from its folder.

A folder may come from anywhere, and a run may still be going on: whatever is missing or not as expected is left out.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcluster.errors import BadRun, FedClusterError
from fedcluster.experiment import format_value, parse, read
from fedcluster.models.metrics import METRICS
from fedcluster.report.events import collect_events, name_of
from fedcluster.report.scores import device_scores
from fedcluster.reporting import Track, untracked
from fedcluster.runs.directory import DIVERGED, FLEET, run_facts
from fedcluster.runs.ledger import COUNTS
from fedcluster.runs.listing import planned_rounds, state_of
from fedcluster.runs.metrics import CYCLES, Line, read_lines
from fedcluster.runs.metrics import METRICS as ROUNDS
from fedcluster.runs.plots import LABELS, X

CYCLES_SHOWN, EVENTS_SHOWN = 20_000, 2000  # of all runs of a report
SMALL = 1 / 20  # the share of a report below which a run is shown without its largest parts
TEXT = 300  # characters of a text that a file has

ENVIRONMENT = ("fedcluster", "torch", "numpy", "python", "machine", "arithmetic", "precision", "cohorts", "parameters")
NOT_SCORES = {*COUNTS, "round", "seconds", "elapsed", "simulated_seconds", "idle_seconds", "dropped", "late"}
NOT_SCORES |= {"failed_cycles", "gradients", "discarded"}
LOWER_IS_BETTER = {"loss", "mse", "rmse", "mae", "perplexity"}

FAILURES = ("failed", "undone", "too_few", "no_sum")  # keys of a cycle that left the model as it was

Column = list[float | None]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs' folders: each of `paths` that is one, and those inside the others, as `compare` leaves them."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if is_run(path) else sorted(one.parent for one in path.rglob("run.json") if is_run(one.parent))
        if not inside:
            what = "has no run in it" if path.is_dir() else "is not a folder"
            raise BadRun(f"{path} {what}: name the folder that run --out wrote, or one that holds several")
        found += [one for one in inside if one not in found]
    return found


def is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / ROUNDS).is_file()


def collect(folders: Sequence[Path], track: Track = untracked) -> list[dict[str, Any]]:
    """What the page needs of each run."""
    names, share = unique_names(folders), 1 / max(1, len(folders))
    numbers = track(range(len(folders)), "reading runs", "runs")
    return [collect_run(folders[number], names[number], share) for number in numbers]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents' as tell them apart."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, 20):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def collect_curves(curves: Mapping[str, Sequence[Sequence[Line]]]) -> list[dict[str, Any]]:
    """Runs of which only the lines of metrics are known, by the name that those of all seeds share."""
    return [
        empty | {"name": f"{name}, seed {seed}", "group": name, "seed": seed} | history(list(lines), {})
        for name, seeds in curves.items()
        for seed, lines in enumerate(seeds)
        for empty in [{"folder": "", "state": "", "planned": None, "experiment": {}, "cycles": cycle_columns([], 1)}]
    ]


def history(lines: list[Line], keys: dict[str, Any]) -> dict[str, Any]:
    """The curves of a run: its scores and counts, and the axes that they can be drawn over."""
    along = {key: [axis(line) for line in lines] for key, (_, axis) in axes(keys).items()}
    return {"rounds": columns(lines), "axes": along}


def collect_run(folder: Path, name: str, share: float = 1.0) -> dict[str, Any]:
    """One run. `share` is its part of what all runs of the page may show in detail."""
    facts = attempt(lambda: run_facts(folder, check=False)) or {}
    keys = attempt(lambda: parse(read(folder / "experiment.toml"), "")) or {}
    lines, cycle_lines = read_lines(folder / ROUNDS), read_lines(folder / CYCLES)
    start = facts.get("start")
    first = [{"round": 0, **start}] if isinstance(start, dict) and start else []
    fleet = fleet_of(folder)
    names = fleet.pop("names", None)
    flat = flatten(keys)
    return {
        "name": name,
        "group": group_of(folder.name, keys),
        "seed": keys.get("seed", 0),
        "folder": str(folder),
        "state": state_of(folder, planned_rounds(folder / "experiment.toml")),
        "reason": (attempt(lambda: (folder / DIVERGED).read_text("utf-8")) or "").strip()[:1000],
        "planned": keys.get("rounds"),
        "experiment": flat,
        "toml": (attempt(lambda: read(folder / "experiment.toml")[:20_000]) or "") if share > SMALL else "",
        "environment": {key: short(facts[key]) for key in ENVIRONMENT if key in facts},
        "command": command(folder, facts),
        **history([*first, *lines], keys),
        "cycles": cycle_columns(cycle_lines, int(CYCLES_SHOWN * share)),
        "events": collect_events(lines, cycle_lines, names, int(EVENTS_SHOWN * share)),
        "fleet": fleet if share > SMALL else light(fleet),
        "devices": device_scores(folder, names),
        "privacy": privacy(keys, lines),
    }


def attempt(read: Any) -> Any:
    """What a function returns, None if its file is missing or not as it should be."""
    try:
        return read()
    except (FedClusterError, OSError, ValueError, KeyError, TypeError):
        return None


def short(value: Any) -> str:
    """A value as TOML writes it, texts without quotation marks."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(short, value[:TEXT]))}]"[:TEXT]
    return (value if isinstance(value, str) else format_value(value))[:TEXT]


def group_of(name: str, keys: dict[str, Any]) -> str:
    """What runs of different seeds have in common: the folder's name without the seed, else the experiment."""
    bare = re.sub(r"[-_ ]?seed[-_=]?\d+", "", name).strip("-_ ")
    if bare != name:
        return LABELS.get(bare, bare)
    return "experiment " + json.dumps({k: v for k, v in keys.items() if k != "seed"}, sort_keys=True, default=str)


def flatten(keys: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The dotted keys of an experiment and their values as text."""
    flat: dict[str, str] = {}
    for key, value in keys.items():
        if isinstance(value, dict) and len(prefix) < TEXT:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"[:TEXT]] = short(value)
    return flat


def command(folder: Path, facts: Line) -> str:
    """The command that repeats the run."""
    federation = (folder / "devices.json").exists()
    words = ["fedcluster", "serve" if federation else "run", shlex.quote(str(folder / "experiment.toml"))]
    if facts.get("precision", "float32") != "float32":
        words += ["--precision", shlex.quote(str(facts["precision"]))]
    if facts.get("cohorts", "sequential") != "sequential":
        words += ["--cohorts", shlex.quote(str(facts["cohorts"]))]
    return " ".join(words)


def axes(keys: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """What curves can be drawn over: the axes of the plots, local steps if all devices take as many, and real time."""
    steps = (keys.get("local") or {}).get("steps") if isinstance(keys.get("local"), dict) else None
    more: dict[str, tuple[str, Any]] = {}
    if isinstance(steps, int):
        more["gradients"] = (
            "gradients (local steps of all devices)",
            lambda line: number(line, "device_updates") * steps,
        )
    more["hours"] = ("hours of computing", lambda line: number(line, "elapsed") / 3600)
    return {key: (label, lambda line, at=at: at_line(at, line)) for key, (label, at) in X.items()} | more


def at_line(axis: Any, line: Line) -> float:
    try:
        value = float(axis(line))
    except (TypeError, ValueError):
        return 0.0
    return value if math.isfinite(value) else 0.0


def number(line: Line, key: str) -> float:
    value = line.get(key, 0)
    return value if is_number(value) else 0.0


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def columns(lines: list[Line]) -> dict[str, Column]:
    """The scores and counts of every round, by name; None where a round has none. Scores of devices are
    `device_<score>_mean` and `device_<score>_worst`."""
    flat = [plain(line) for line in lines]
    names = dict.fromkeys(name for line in flat for name in line)
    return {name: [line.get(name) for line in flat] for name in names}


def plain(line: Line) -> dict[str, float]:
    values = {key[:TEXT]: value for key, value in line.items() if is_number(value)}
    by_device = line.get("by_device")
    for name, spread in by_device.items() if isinstance(by_device, dict) else ():
        if isinstance(spread, dict):
            for key, ending in (("mean", "mean"), ("worst_decile", "worst")):
                if is_number(spread.get(key)):
                    values[f"device_{name[:TEXT]}_{ending}"] = spread[key]
    return values


def scores(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The scores that curves can show: their label, what to multiply them by, and whether higher is better."""
    names = dict.fromkeys(name for run in runs for name in run["rounds"] if name not in NOT_SCORES)
    return [score(name) for name in names]


def score(name: str) -> dict[str, Any]:
    where, _, rest = name.partition("_")
    base, after = rest, ""
    if where == "device":
        base, _, ending = rest.rpartition("_")
        after = ", mean of devices" if ending == "mean" else ", mean of the worst tenth of devices"
    metric = METRICS.get(base)
    percent = bool(metric and metric.percent)
    words = {"train": "training ", "test": "test ", "device": ""}
    label = f"{words[where]}{base}{after}" if where in words else name
    if name == "epsilon":
        label = "epsilon spent"
    higher = metric.higher_is_better if metric else not (name == "epsilon" or base in LOWER_IS_BETTER)
    return {"key": name, "label": label.replace("_", " "), "percent": percent, "higher": higher}


def cycle_columns(lines: list[Line], most: int) -> dict[str, Any]:
    """The cycles of every round or, where there are more than `most`, of rounds at equal distances and of the last."""
    rounds = sorted({line["round"] for line in lines})
    each = max(1, len(lines) // max(1, len(rounds)))
    step = max(1, -(-len(rounds) * each // max(1, most)))
    kept = {*rounds[::step], *rounds[-1:]}
    table: dict[str, list[Any]] = {"round": []}
    chosen = [line for line in lines if line["round"] in kept]
    table["round"] = [line["round"] for line in chosen]
    for key in ("cycle", "cluster", "moved", "cosine", "refused", "opened", "simulated_seconds", "seconds"):
        table[key] = [line.get(key) if is_number(line.get(key)) else None for line in chosen]
    for key in ("cohort", "missing", "dropped", "late"):
        table[key] = [len(line[key]) if isinstance(line.get(key), list) else 0 for line in chosen]
    table["failed"] = [int(failed(line)) for line in chosen]
    return table | {"every": step}


def failed(line: Line) -> bool:
    """Whether a cycle left the model as it was: it says why, or none of its updates was accepted."""
    return any(line.get(key) for key in FAILURES) or line.get("changed") is False


def fleet_of(folder: Path) -> dict[str, Any]:
    """fleet.json, if it is there and has the parts that the page shows."""
    fleet = attempt(lambda: json.loads((folder / FLEET).read_bytes()))
    if not isinstance(fleet, dict) or not table(fleet.get("clusters"), "devices", "samples", "weight"):
        return {}
    if not table(fleet.get("shown"), "device", "cluster", "shares"):
        fleet.pop("shown", None)
    for key in ("class_shares", "free"):
        if not matrix(fleet.get(key)):
            fleet.pop(key, None)
    for one in fleet["shown"] if isinstance(fleet.get("shown"), list) else ():
        one["name"] = name_of(one["device"], fleet.get("names"))
    return fleet


def light(fleet: dict[str, Any]) -> dict[str, Any]:
    """Only its sizes."""
    return {key: fleet[key] for key in ("devices", "sampled", "left_out", "samples", "clusters") if key in fleet}


def table(rows: Any, *keys: str) -> bool:
    """Whether this is a list of mappings that have these keys."""
    return isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows)


def matrix(rows: Any) -> bool:
    """Whether these are rows of numbers, all as long as the first."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        return False
    return all(len(row) == len(rows[0]) > 0 and all(map(is_number, row)) for row in rows)


def privacy(keys: dict[str, Any], lines: list[Line]) -> dict[str, Any]:
    """What the experiment allows, and the epsilon that the run has spent."""
    section = keys.get("privacy")
    allowed = flatten(section) if isinstance(section, dict) else {}
    spent = next((line["epsilon"] for line in reversed(lines) if is_number(line.get("epsilon"))), None)
    return {"allowed": allowed, "epsilon": spent}
