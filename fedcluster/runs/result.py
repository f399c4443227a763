"""What a run returns, and how a notebook shows it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedcluster.figures import Plot, html_table
from fedcluster.models.metrics import recorded_metrics
from fedcluster.runs.metrics import Line
from fedcluster.runs.plots import curves_plot


@dataclass(frozen=True)
class Result:
    """What a run returns: the lines of metrics.jsonl, the trained module, and the folder that it wrote to. In a
    notebook it shows itself as a table and curves."""

    history: list[Line]
    model: nn.Module
    out: Path | None = None

    def to_pandas(self) -> Any:
        """The history as a DataFrame: a row for every round, with the round as its index."""
        import pandas

        return pandas.DataFrame(self.history).set_index("round")

    def plot(self, x: str = "rounds") -> Plot:
        """Loss and metrics over "rounds", "aggregations", "updates", "bytes" or "time"."""
        return curves_plot({"run": [self.history]}, x=x)

    def __repr__(self) -> str:
        return f"Result({len(self.history)} rounds of {type(self.model).__name__}, out={self.out})"

    def _repr_html_(self) -> str:
        parameters = sum(weights.numel() for weights in self.model.parameters())
        rows = [("parameters", f"{parameters:,}"), ("rounds", f"{len(self.history):,}")]
        if self.history:
            last = self.history[-1]
            names = {"train_loss": "training loss", "test_loss": "test loss"}
            losses = [(name, f"{last[key]:.4f}") for key, name in names.items() if key in last]
            scores = [(f"test {one.label}", one.text(last[f"test_{one.name}"])) for one in recorded_metrics(last)]
            rows += [*losses, *scores, ("device updates", f"{last.get('device_updates', 0):,}")]
        rows += [("folder", str(self.out))] if self.out else []
        drawn = self.plot().html("loss and metrics over rounds") if scored(self.history) else ""
        return html_table((type(self.model).__name__, ""), rows) + drawn


def scored(history: list[Line]) -> bool:
    """Whether there are curves to draw: a server without data has no scores."""
    return bool(history) and ("train_loss" in history[-1] or "test_loss" in history[-1])
