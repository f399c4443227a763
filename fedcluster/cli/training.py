"""The commands that train, and the one that scores what was trained."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedcluster.analysis.names import DEFAULT_METHODS, FIGURES, METHODS, Axis, Figure, PaperAxis, Rates, Scale
from fedcluster.cli import completion
from fedcluster.cli.common import (
    ExperimentFile,
    Out,
    Overrides,
    Resume,
    echo,
    exit_on_error,
    load,
    need_out,
    reading,
)
from fedcluster.cli.ending import Ending, Html
from fedcluster.cli.report import LivePort, ShowLive, shown_live

ABSURD = 1000  # a training loss: guessing among 10,000 classes has 9.2
REGRESSION = {"test_mse", "test_rmse", "test_mae", "test_r2"}  # whose losses are in units of the target


def run(
    experiment: ExperimentFile,
    o: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processes to train in. Default: one per core.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to train on: cpu, cuda, cuda:1, ...")] = "cpu",
    cohorts: Annotated[
        Literal["sequential", "stacked", "auto"],
        typer.Option(
            metavar="HOW",
            help="Train a cohort's devices one after the other (sequential), stacked, or whichever is faster (auto).",
        ),
    ] = "sequential",
    precision: Annotated[
        Literal["float32", "bf16"],
        typer.Option(
            metavar="NAME",
            help="Compute gradients in float32, or in mixed precision with bfloat16 (bf16).",
        ),
    ] = "float32",
    strict_budget: Annotated[
        bool,
        typer.Option(
            "--strict-budget",
            help="Refuse algorithms that need more than one download and upload per device and round.",
        ),
    ] = False,
    live: ShowLive = False,
    live_port: LivePort = 0,
) -> None:
    """Train one experiment."""
    with exit_on_error("--resume"):
        need_out(out, resume)
        described = load(experiment, o)
        from fedcluster.cli.tables import test_scores
        from fedcluster.runs.directory import fresh
        from fedcluster.training.executors.processes import cores
        from fedcluster.training.run import run as train

        out = out or fresh(experiment.stem)
        with shown_live(live, live_port, out) as callbacks:
            result = train(
                described,
                out,
                resume,
                workers=workers or cores(),
                device=device,
                cohorts=cohorts,
                precision=precision,
                strict_budget=strict_budget,
                callbacks=callbacks,
            )
        if result.out is None:
            return  # torchrun's other ranks
        last = result.history[-1]
        if last["train_loss"] > ABSURD and not REGRESSION & last.keys():
            echo(
                f"the training loss {last['train_loss']:.3g} is far too high: lower local.lr, or scale the features",
                err=True,
            )
        echo(
            f"training loss {last['train_loss']:.4f}, {test_scores(last)}after "
            f"{last['round']} round{'s' * (last['round'] > 1)}, {last['device_updates']:,} device updates, "
            f"{last['elapsed']:.0f} s"
        )
        echo(f"Plot saved to {result.out}/curves.png")


def compare(
    experiment: Annotated[
        Path | None,
        typer.Argument(metavar="[EXPERIMENT.toml]", help="Default: the embedded digits.", show_default=False),
    ] = None,
    o: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Methods to compare, separated by commas: also fedcluster+, minibatch.",
            autocompletion=completion.methods,
        ),
    ] = ",".join(DEFAULT_METHODS),
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="INTEGER", help="Number of seeds, counted from the experiment's.")
    ] = 3,
    lr: Annotated[
        Rates,
        typer.Option(
            metavar="RATES",
            help="Learning rates. paper: FedAvg's is M times local.lr; equal; tuned: each method's best.",
        ),
    ] = "paper",
    target: Annotated[
        float | None,
        typer.Option(help="Training loss to reach. Default: the highest final loss of all runs.", show_default=False),
    ] = None,
    x: Annotated[
        Axis | None,
        typer.Option(
            metavar="AXIS",
            help="Compare over rounds, aggregations, updates, bytes or, with simulated time, time. Default: rounds, or "
            "updates where budgets differ.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
    resume: Resume = False,
    html: Html = None,
) -> None:
    """Train with several methods on the same fleet, from the same start, with the same budget."""
    with exit_on_error("--resume"):
        need_out(out, resume)
        names = method_names(methods)
        described = load(experiment or Path(__file__).with_name("demo.toml"), o)
        from fedcluster.analysis import compare as comparison
        from fedcluster.cli import tables
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import stages
        from fedcluster.training.executors.processes import cores

        out = out or fresh(f"compare-{experiment.stem if experiment else 'digits'}")
        with stages() as progress:
            result = comparison.compare(
                described,
                names,
                seeds,
                lr,
                target,
                out,
                resume,
                workers=cores(),
                progress=progress,
                x=x,
            )
        ending = Ending(f"comparison on {experiment.stem if experiment else 'digits'}", html)
        ending.show(tables.outcomes_table(result), "Methods")
        for remark in tables.verdict(result):
            ending.say(remark)
        echo(f"Plot saved to {out}/curves.png")
        all_seeds = range(described.seed, described.seed + seeds)
        ending.finish(runs=[out / f"{one.method}-seed{seed}" for one in result.outcomes for seed in all_seeds])


def method_names(text: str) -> list[str]:
    """The methods in a list with commas."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in METHODS]
    if unknown or len(set(names)) < len(names):
        problem = f"{unknown[0] or 'an empty name'} is not a method" if unknown else f"{text} names a method twice"
        raise typer.BadParameter(f"{problem}: methods are {', '.join(METHODS)}", param_hint="--methods")
    return names


def reproduce(
    figure: Annotated[Literal[Figure, "all"], typer.Argument(metavar="|".join((*FIGURES, "all")), show_default=False)],
    scale: Annotated[
        Scale,
        typer.Option(
            metavar="SCALE",
            help="quick: MNIST, 20 minutes; standard: both data sets, hours; paper: for a GPU.",
        ),
    ] = "quick",
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Number of seeds. Default: that of the scale.")
    ] = None,
    lr: Annotated[
        Rates,
        typer.Option(
            metavar="RATES",
            help="Learning rates: paper, equal, or tuned, each curve at its best.",
        ),
    ] = "paper",
    x: Annotated[
        PaperAxis,
        typer.Option(metavar="AXIS", help="Draw over rounds, aggregations, updates or bytes."),
    ] = "rounds",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder; runs that are finished there are not repeated.")
    ] = None,
    html: Html = None,
) -> None:
    """Reproduce a figure of the paper, and judge its claims."""
    with exit_on_error("the same command"):
        out = out or Path("runs", f"paper-{scale}-{lr}")
        reading(out)
        from fedcluster.analysis.paper.reproduce import reproduce as run_figures
        from fedcluster.analysis.paper.table import read_curves
        from fedcluster.cli.grid import Grid
        from fedcluster.runs.progress import stages
        from fedcluster.training.executors.processes import cores

        figures, ending = list(FIGURES) if figure == "all" else [str(figure)], Ending(f"{figure} of the paper", html)
        with stages() as progress:
            verdicts = run_figures(
                figures,
                scale,
                lr,
                seeds,
                x,
                out,
                cores(),
                progress,
                lambda text: echo(text, err=True),
            )
        rows = [[v.claim, v.verdict, *v.lower()] for v in verdicts]
        ending.show(Grid(["claim", "verdict", "lower by", "95 % interval"], rows, left=2), "Verdicts")
        echo(f"Plots, data and verdicts are in {out}/")
        drawn = {
            out / (f"{name}.png" if x == "rounds" else f"{name}-{x}.png"): f"{name} of the paper" for name in figures
        }
        pictures = {path: words for path, words in drawn.items() if path.exists()}
        ending.finish(pictures, curves=read_curves(out, figures) if html else {})


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Score on the test part of other data, as for data.name.",
            autocompletion=completion.data,
        ),
    ] = None,
    devices: Annotated[
        bool, typer.Option("--devices", help="Score each device on its own held-out samples (fleet.test_share).")
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="Score the best model that the run kept (eval.best).")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output folder of --devices. Default: a new one under runs/."),
    ] = None,
) -> None:
    """Score the model of a run."""
    with exit_on_error():
        if devices and data is not None:
            raise typer.BadParameter("--devices scores the devices of the run's own data: leave out --data")
        reading(run)
        from fedcluster.analysis import evaluate as evaluation
        from fedcluster.cli import tables
        from fedcluster.cli.grid import show
        from fedcluster.runs.directory import fresh
        from fedcluster.runs.progress import say
        from fedcluster.training.executors.processes import cores

        scores = evaluation.evaluate(run, data, devices, best, cores(), say)
        echo(f"{scores.samples:,} test samples of {scores.data}, model of round {scores.round}:")
        show(tables.scores_table(scores))
        if scores.by_device is not None:
            show(tables.distribution_table(scores))
            show(tables.cluster_scores_table(scores))
            files = evaluation.write(scores, out or fresh(f"evaluate-{run.resolve().name}"))
            echo("Written: " + ", ".join(map(str, files)))
