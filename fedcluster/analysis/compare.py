"""A fair comparison: the same fleet, start and budget for every method, over several seeds."""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcluster.analysis.jobs import Job, run_all
from fedcluster.analysis.methods import WITH_CLUSTERS, Methods, describe
from fedcluster.analysis.names import DEFAULT_METHODS, METHODS, RATES
from fedcluster.analysis.tuning import TUNING_SEEDS, best_rates
from fedcluster.errors import BadExperiment, BadRun, Diverged
from fedcluster.experiment import Experiment, changes, parse, read
from fedcluster.figures import Plot, html_table
from fedcluster.files import write_atomically
from fedcluster.models.metrics import recorded_metrics
from fedcluster.processes import leave_if_importing
from fedcluster.runs.metrics import Line
from fedcluster.runs.plots import LABELS, X, curves_plot
from fedcluster.runs.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """One method: its learning rate and its curve for each seed, from the start (round 0)."""

    method: str
    lr: float
    clusters: int
    histories: list[list[Line]]

    @property
    def updates(self) -> int:
        """Device updates over all seeds."""
        return sum(lines[-1].get("device_updates", 0) for lines in self.histories)

    def final(self, key: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds at the last round."""
        values = [lines[-1][key] for lines in self.histories]
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    def final_text(self, key: str, text: Callable[[float], str]) -> str:
        """The mean at the last round, and the deviation where there are several seeds."""
        mean, deviation = map(text, self.final(key))
        return f"{mean} ± {deviation}" if len(self.histories) > 1 else mean

    def rounds_to(self, loss: float) -> list[int | None]:
        """For each seed the first round with a training loss of at most `loss`."""
        return [next((line["round"] for line in lines if line["train_loss"] <= loss), None) for lines in self.histories]

    def reach(self, loss: float, x: str) -> list[float | None]:
        """For each seed the value of `x` at that round."""
        return [next((X[x][1](line) for line in lines if line["train_loss"] <= loss), None) for lines in self.histories]


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns. In a notebook it shows itself as a table and curves."""

    outcomes: list[Outcome]
    target: float
    lr: str
    x: str = "rounds"
    title: str = ""
    remarks: tuple[str, ...] = ()  # on the budgets

    def to_pandas(self) -> Any:
        """A DataFrame with a row for every method, seed (its number, from 0) and round."""
        import pandas

        return pandas.DataFrame(
            {"method": outcome.method, "lr": outcome.lr, "seed": seed, **line}
            for outcome in self.outcomes
            for seed, lines in enumerate(outcome.histories)
            for line in lines
        )

    def plot(self, x: str | None = None) -> Plot:
        """A curve for every method and a band over its seeds, over the comparison's `x` or another one."""
        return curves_plot({one.method: one.histories for one in self.outcomes}, self.title, x or self.x)

    def __repr__(self) -> str:
        methods = ", ".join(one.method for one in self.outcomes)
        return f"Comparison({methods}; {len(self.outcomes[0].histories)} seeds)"

    def _repr_html_(self) -> str:
        rows = []
        for outcome in self.outcomes:
            last = outcome.histories[0][-1]
            row = {"method": LABELS[outcome.method], "M": outcome.clusters, "learning rate": f"{outcome.lr:g}"}
            row["training loss"] = outcome.final_text("train_loss", "{:.4f}".format)
            for metric in recorded_metrics(last):
                row[f"test {metric.label}"] = outcome.final_text(f"test_{metric.name}", metric.text)
            rows.append(row | {"device updates": f"{last.get('device_updates', 0):,}"})
        table = html_table(list(rows[0]), [list(row.values()) for row in rows])
        return table + self.plot().html("loss and metrics of every method")


def compare(
    experiment: Experiment,
    methods: Sequence[str] = DEFAULT_METHODS,
    seeds: int = 3,
    lr: str = "paper",
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    progress: Progress = lambda stage, done, total: None,
    x: str | None = None,
) -> Comparison:
    """Run every method on every seed.

    `lr`: "paper" (local.lr for FedCluster and centralized SGD, M times that for FedAvg, E times for minibatch SGD),
    "equal" (local.lr for all) or "tuned" (each method's best rate, found on other seeds). The plot and the table are
    over `x`: "rounds", "aggregations", "updates", "bytes" or "time". Left out, it is "rounds" where all methods had the
    same number of device updates, else "updates".
    """
    leave_if_importing()
    check_options(experiment, methods, seeds, lr, workers, x)
    all_seeds = range(experiment.seed, experiment.seed + seeds)
    described = describe(experiment, [*all_seeds, *(TUNING_SEEDS if lr == "tuned" else ())])
    with nullcontext(out) if out is not None else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_folder(folder, experiment, resume or out is None)
        rates = learning_rates(described, methods, lr, folder, workers, progress)
        jobs = {
            method: [Job(f"{method}-seed{seed}", described.variant(method, rates[method], seed)) for seed in all_seeds]
            for method in methods
        }
        by_seed = [job for same_seed in zip(*jobs.values(), strict=True) for job in same_seed]
        histories = run_all(by_seed, folder, workers, lambda done, total: progress("comparing", done, total))
        outcomes = []
        for method in methods:
            lines = []
            for job in jobs[method]:
                history = histories[job.name]
                if isinstance(history, Diverged):
                    raise Diverged(f"{LABELS[method]} at rate {rates[method]:g}: {history}")
                lines.append(history)
            outcomes.append(Outcome(method, rates[method], described.clusters if method in WITH_CLUSTERS else 1, lines))
        if target is None:
            target = max(lines[-1]["train_loss"] for outcome in outcomes for lines in outcome.histories)
        unequal, raised = unequal_budgets(outcomes), other_participation(described, methods)
        x = x or ("updates" if unequal else "rounds")
        if unequal and x != "updates":
            unequal += " Compare over updates (--x updates)."
        remarks = tuple(remark for remark in (raised, unequal) if remark)
        comparison = Comparison(outcomes, target, lr, x, caption(experiment, seeds, lr), remarks)
        comparison.plot().save(folder / "curves.png")
        write_atomically(folder / "comparison.json", json.dumps(summary(comparison), indent=2) + "\n")
        return comparison


def unequal_budgets(outcomes: Sequence[Outcome]) -> str | None:
    """A sentence where methods had different numbers of device updates: devices were lost, or cohorts are random."""
    spent = {LABELS[one.method]: one.updates for one in outcomes if one.method != "centralized"}
    if len(set(spent.values())) < 2:
        return None
    numbers = ", ".join(f"{method} {updates:,}" for method, updates in spent.items())
    return f"The budgets differ. Device updates over all seeds: {numbers}."


def other_participation(described: Methods, methods: Sequence[str]) -> str | None:
    """A sentence where FedAvg's cohorts are not those of `clusters.participation`."""
    share = described.experiment.clusters.participation
    given = described.participation[described.experiment.seed]
    if "fedavg" not in methods or given == share:
        return None
    return (
        f"FedAvg's participation is {given:.3g}, not {share:g}, so that it has as many device updates a round as "
        "FedCluster."
    )


def check_options(
    experiment: Experiment, methods: Sequence[str], seeds: int, lr: str, workers: int, x: str | None
) -> None:
    if type(workers) is not int or workers < 1:
        raise BadExperiment(f"workers = {workers!r} is not allowed: use a whole number from 1 on")
    if not methods or set(methods) - set(METHODS) or lr not in RATES or not 1 <= seeds <= 1000:
        raise BadExperiment(
            f"cannot compare methods {', '.join(methods)} with lr {lr} over {seeds} seeds: "
            f"methods are {', '.join(METHODS)}, lr is {', '.join(RATES)}, and seeds at least 1 and at most 1000"
        )
    if x not in (None, *X):
        raise BadExperiment(f"cannot compare over {x}: x is {', '.join(X)}")
    if x == "time" and experiment.clock is None:
        raise BadExperiment("comparing over time needs simulated time: add a section [clock] to the experiment")


def learning_rates(
    described: Methods, methods: Sequence[str], lr: str, out: Path, workers: int, progress: Progress
) -> dict[str, float]:
    """The learning rate of every method."""
    base = described.experiment.local.lr
    if lr == "equal":
        return dict.fromkeys(methods, base)
    if lr == "paper":
        return {method: described.paper_rate(method) for method in methods}

    def job(method: str, rate: float, seed: int) -> Job:
        return Job(f"tune-{method}-{rate:g}-seed{seed}", described.variant(method, rate, seed))

    best = best_rates(dict.fromkeys(methods, base), job, out, workers, progress)
    return {method: tuned.lr for method, tuned in best.items()}


def prepare_folder(out: Path, experiment: Experiment, resume: bool) -> None:
    """Make the folder of a comparison, or check that it belongs to the same experiment."""
    path = out / "experiment.toml"
    if path.exists():
        if not resume:
            raise BadRun(f"{out} already holds a comparison: continue it with --resume, or choose another --out")
        changed = changes(parse(read(path), str(path)), experiment.to_dict())
        if changed:
            raise BadRun(f"{out} holds a comparison of another experiment, which differs in {', '.join(changed)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, experiment.to_toml())
    except OSError as error:
        raise BadRun(f"cannot write to {out} ({error.strerror}): choose another folder with --out") from None


def caption(experiment: Experiment, seeds: int, lr: str) -> str:
    data = experiment.data.name if isinstance(experiment.data.name, str) else "data"
    rates = {
        "paper": "FedAvg's rate is M times FedCluster's, as in the paper",
        "equal": "equal rates",
        "tuned": "each at its own best rate",
    }[lr]
    return f"{Path(data).name}, {seeds} seed{'s' * (seeds > 1)} (band: lowest to highest), {rates}"


def summary(comparison: Comparison) -> dict[str, Any]:
    """The contents of comparison.json."""
    methods = {}
    for outcome in comparison.outcomes:
        entry: dict[str, Any] = {
            "lr": outcome.lr,
            "clusters": outcome.clusters,
            "rounds_to_target": outcome.rounds_to(comparison.target),
        }
        if comparison.x != "rounds":
            entry[f"{comparison.x}_to_target"] = outcome.reach(comparison.target, comparison.x)
        methods[outcome.method] = entry | {"final": [lines[-1] for lines in outcome.histories]}
    return {"lr": comparison.lr, "target_train_loss": comparison.target, "methods": methods}
