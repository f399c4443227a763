"""What a notebook shows: tables and pictures of our objects, and the notebooks in examples/, whose code runs."""

import json
import sys
from base64 import b64decode
from pathlib import Path
from re import findall
from types import SimpleNamespace

import pytest

import fedcluster
from fedcluster.figures import html_table
from fedcluster.runs.progress import Display, Log, Notebook, default_display

EXPERIMENT = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 20, "samples": 20},
    clusters={"count": 4, "participation": 0.5},
    model={"name": "logistic"},
    local={"steps": 2, "lr": 0.1},
)
NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def pictures(html: str) -> list[bytes]:
    """The first bytes of the pictures in a page."""
    return [b64decode(data)[:8] for data in findall(r'src="data:image/png;base64,([^"]+)"', html)]


PNG = b"\x89PNG\r\n\x1a\n"


def test_a_result_shows_its_scores_and_curves_and_becomes_a_table() -> None:
    result = fedcluster.run(EXPERIMENT, display=Display())
    html = result._repr_html_()
    assert pictures(html) == [PNG]
    assert f"<td>{result.history[-1]['test_loss']:.4f}</td>" in html
    table = result.to_pandas()
    assert table.loc[2, "test_loss"] == result.history[-1]["test_loss"]
    assert result.plot(x="aggregations")._repr_png_()[:8] == PNG


def test_a_comparison_shows_every_method_and_becomes_a_table() -> None:
    comparison = fedcluster.compare(EXPERIMENT, methods=["fedavg", "fedcluster"], seeds=2, lr="equal")
    html = comparison._repr_html_()
    assert pictures(html) == [PNG]
    mean, deviation = comparison.outcomes[1].final("train_loss")
    assert f"<td>FedCluster</td><td>4</td><td>0.1</td><td>{mean:.4f} ± {deviation:.4f}</td>" in html
    table = comparison.to_pandas()
    assert sorted(set(zip(table["method"], table["seed"], table["round"], strict=True))) == [
        (method, seed, round) for method in ("fedavg", "fedcluster") for seed in (0, 1) for round in (0, 1, 2)
    ]


def test_a_fleet_and_its_clusters_show_themselves() -> None:
    report = fedcluster.partition(EXPERIMENT, Display())
    for shown in (report, report.fleet, report.clusters):
        assert pictures(shown._repr_html_()) == [PNG]
    assert "<td>20</td>" in report.fleet._repr_html_()


def test_names_are_text_and_not_markup() -> None:
    assert "&lt;script&gt;" in html_table(("<script>", "b"), [("<b>", 1)])
    assert "<b>" not in html_table(("a",), [("<b>",)])


def test_a_notebook_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(default_display(), Log)
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    display = default_display()
    assert isinstance(display, Notebook)
    fedcluster.run(EXPERIMENT, display=display)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_of_a_notebook_runs_and_its_outputs_are_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": path.stem}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(path), "exec"), names)  # noqa: S102
        assert cell["execution_count"], "it was saved without being executed"
    assert any("image/png" in json.dumps(cell["outputs"]) for cell in cells)
