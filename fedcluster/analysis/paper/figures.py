"""The paper's figures as experiments: panels, and in each panel the curves that are compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedcluster.analysis.paper.choices import ADAM_FACTOR, CENTRALIZED_LR, FEDAVG_LR, SCALES
from fedcluster.experiment import Experiment

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"local.optimizer": "momentum", "local.momentum": 0.5},
    "Adam": {"local.optimizer": "adam"},
    "FedProx": {"algorithm.name": "fedprox", "algorithm.mu": 0.1},
}
TITLES = {
    "fig2": "Heterogeneity of devices, CIFAR-10",
    "fig3": "Heterogeneity of devices, MNIST",
    "fig4": "Local optimizers",
    "fig5": "Number of clusters",
    "fig6": "Heterogeneity of clusters",
}


@dataclass(frozen=True)
class Curve:
    """A method in a panel ("fedavg", "fedcluster", "centralized" or "control"), M, and other keys that differ."""

    method: str
    label: str
    clusters: int
    keys: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Panel:
    """One data set and one setting. Its curves have the same start and fleet."""

    figure: str
    data: str
    title: str
    curves: tuple[Curve, ...]
    keys: tuple[tuple[str, Any], ...]


FEDAVG = Curve("fedavg", "FedAvg", 1)
FEDCLUSTER = Curve("fedcluster", "FedCluster", 10)
CENTRALIZED = Curve("centralized", "centralized SGD", 1)
CONTROL = Curve("control", "small cohorts, no clusters", 10)


def panels(figure: str, scale: str) -> list[Panel]:
    """The panels of a figure on the data sets of the scale."""
    return [panel for panel in all_panels(figure) if panel.data in SCALES[scale].rounds]


def all_panels(figure: str) -> Iterator[Panel]:
    if figure in ("fig2", "fig3"):
        for rho in (0.1, 0.4, 0.7, 0.9):
            curves = (FEDAVG, FEDCLUSTER, CENTRALIZED, CONTROL)
            data = "cifar10" if figure == "fig2" else "mnist"
            yield Panel(figure, data, f"ρ_device = {rho}", curves, (("fleet.rho_device", rho),))
        return
    for data in ("cifar10", "mnist"):
        if figure == "fig4":
            for rho in (0.1, 0.5):
                for name, keys in OPTIMIZERS.items():
                    title = f"{name}, ρ_device = {rho}"
                    setting = (("fleet.rho_device", rho), *keys.items())
                    yield Panel(figure, data, title, (FEDAVG, FEDCLUSTER), setting)
        elif figure == "fig5":
            for rho in (0.1, 0.5):
                counts = tuple(Curve("fedcluster", f"FedCluster, M = {m}", m) for m in (5, 10, 20))
                yield Panel(figure, data, f"ρ_device = {rho}", (FEDAVG, *counts), (("fleet.rho_device", rho),))
        elif figure == "fig6":
            shares = tuple(
                Curve(
                    "fedcluster",
                    f"FedCluster, ρ_cluster = {share}",
                    10,
                    (("clusters.method", "major_class"), ("clusters.rho_cluster", share)),
                )
                for share in (0.1, 0.5, 0.9)
            )
            yield Panel(figure, data, "ρ_device = 0.5", (FEDAVG, *shares), (("fleet.rho_device", 0.5),))


def rate(panel: Panel, curve: Curve, rates: str) -> float:
    """The learning rate of a curve. With "equal" all have the paper's for FedCluster."""
    base = FEDAVG_LR[panel.data]
    if dict(panel.keys).get("local.optimizer") == "adam":
        base *= ADAM_FACTOR
    if rates == "equal":
        return base / 10
    if curve.method == "centralized":
        return CENTRALIZED_LR[panel.data]
    return base / curve.clusters


def experiment(panel: Panel, curve: Curve, scale: str, rates: str, seed: int) -> Experiment:
    """The experiment of a curve. The control has no clusters: every round it draws as many cohorts of the same size
    from the whole fleet, without replacement."""
    size = SCALES[scale]
    keys: dict[str, Any] = {
        "seed": seed,
        "rounds": size.rounds[panel.data],
        "data.name": panel.data,
        "model.name": size.model,
        "clusters.count": curve.clusters,
        "local.lr": float(f"{rate(panel, curve, rates):.6g}"),
        **dict(panel.keys),
        **dict(curve.keys),
    }
    if curve.method == "centralized":
        keys |= {"method": "centralized", "clusters.count": 10}
    if curve.method == "control":
        keys |= {"clusters.method": "redrawn"}
    return Experiment().override(**keys)
