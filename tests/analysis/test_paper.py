"""The figures are the paper's experiments, and the verdicts say what the runs say."""

import csv
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from fedcluster.analysis.names import FIGURES
from fedcluster.analysis.paper import choices, table
from fedcluster.analysis.paper.claims import (
    advantage,
    all_of,
    comparable,
    fewer_errors,
    interval,
    judge,
    larger,
    last_advantage,
    questions,
    rounds_saved,
    rounds_to,
)
from fedcluster.analysis.paper.figures import CONTROL, FEDAVG, FEDCLUSTER, experiment, panels
from fedcluster.analysis.paper.reproduce import complete, job
from fedcluster.analysis.tuning import TUNING_SEEDS, rate
from fedcluster.training.setup import prepare
from tests.report.folders import data_in


def history(*losses: float) -> list[dict[str, Any]]:
    """Curves whose test error is a tenth of the loss."""
    return [{"round": j, "train_loss": loss, "test_accuracy": 1 - loss / 10} for j, loss in enumerate(losses)]


def test_the_papers_rates() -> None:
    for figure, fedavg, central in (("fig2", 0.1, 0.01), ("fig3", 0.05, 0.005)):
        panel = panels(figure, "standard")[0]
        rates = {c.method: experiment(panel, c, "standard", "paper", 0).local.lr for c in panel.curves}
        expected = {"fedavg": fedavg, "fedcluster": fedavg / 10, "control": fedavg / 10, "centralized": central}
        assert rates == pytest.approx(expected)
    five, ten, twenty = panels("fig5", "standard")[0].curves[1:]
    for curve, m in ((five, 5), (ten, 10), (twenty, 20)):
        described = experiment(panels("fig5", "standard")[0], curve, "standard", "paper", 0)
        assert described.clusters.count == m
        assert described.local.lr == pytest.approx(0.1 / m)


def test_the_papers_settings() -> None:
    sizes = {figure: len(panels(figure, "standard")) for figure in FIGURES}
    assert sizes == {"fig2": 4, "fig3": 4, "fig4": 12, "fig5": 4, "fig6": 2}
    assert not panels("fig2", "quick")
    for figure in FIGURES:
        for panel in panels(figure, "standard"):
            for curve in panel.curves:
                e = experiment(panel, curve, "standard", "paper", 1)
                assert (e.fleet.devices, e.fleet.samples, e.local.steps, e.local.batch) == (1000, 500, 20, 30)
                assert e.clusters.participation == 0.1
                assert e.seed == 1
    shares = [dict(curve.keys).get("clusters.rho_cluster") for curve in panels("fig6", "standard")[0].curves]
    assert shares == [None, 0.1, 0.5, 0.9]


def test_figures_share_their_runs() -> None:
    first, other = panels("fig3", "standard")[0], next(p for p in panels("fig5", "standard") if p.data == "mnist")
    ten = other.curves[2]
    for a, b in ((FEDAVG, FEDAVG), (FEDCLUSTER, ten)):
        assert job(experiment(first, a, "standard", "paper", 0)) == job(experiment(other, b, "standard", "paper", 0))


def test_the_control_has_cohorts_and_no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = panels("fig3", "quick")[0]
    described = experiment(panel, CONTROL, "quick", "paper", 0).override(
        **{"data.name": "digits", "model.name": "logistic"}
    )
    schedule = prepare(described).schedule
    rounds = [schedule.round(j) for j in range(2)]
    for cycles in rounds:
        devices = np.concatenate([cycle.cohort for cycle in cycles])
        assert len(cycles) == 10
        assert len(np.unique(devices)) == len(devices) == 100
    groups = [schedule.round(j)[0].cohort.tolist() for j in range(2)]
    assert groups[0] != groups[1]
    again = prepare(described).schedule.round(1)
    assert [c.cohort.tolist() for c in again] == [c.cohort.tolist() for c in rounds[1]]


def test_intervals_are_students() -> None:
    effects = [0.3, 0.1, 0.25, 0.05]
    mean, low, high = interval(effects)
    expected = ttest_1samp(effects, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((np.mean(effects), expected.low, expected.high))


@pytest.mark.parametrize(
    ("effects", "verdict", "alike"),
    [
        ([0.3, 0.31, 0.29], "reproduced", "not reproduced"),
        ([-0.3, -0.31, -0.29], "not reproduced", "not reproduced"),
        ([0.01, -0.01, 0.0], "undecided", "reproduced"),
        ([0.5, -0.4, 0.1], "undecided", "undecided"),
        ([0.3], "undecided", "undecided"),
    ],
)
def test_verdicts(effects: list[float], verdict: str, alike: str) -> None:
    found = larger("fig2", "a claim", effects)
    assert found.verdict == verdict
    json.dumps(found.numbers(), allow_nan=False)
    assert comparable("fig2", "a claim", effects).verdict == alike


def test_people_are_told_how_much_lower_the_loss_is() -> None:
    halved = larger("fig2", "a claim", [np.log(2), np.log(2)])
    assert halved.lower() == ("+50.0 %", "+50.0 to +50.0")
    assert larger("fig2", "a claim", [-np.log(1.25)]).lower() == ("-25.0 %", "-")


def test_rounds_to_the_same_loss() -> None:
    fast, slow, worse = history(4.0, 2.0, 1.0, 0.5), history(4.0, 3.0, 2.0, 1.0), history(4.0, 5.0, 6.0, 7.0)
    assert rounds_saved(fast, slow) == pytest.approx(np.log(3 / 2))
    assert rounds_saved(slow, fast) == pytest.approx(-np.log(3 / 2))
    assert rounds_saved(fast, fast) == rounds_saved(worse, worse) == rounds_saved(fast, worse) == 0.0
    assert rounds_to([4.0, 3.0, 1.0], 2.0) == pytest.approx(1.5)
    assert rounds_to([4.0, 3.0, 1.0], 0.5) == np.inf


def test_a_claim_about_all_fails_with_one() -> None:
    good, bad, open_ = (larger("f", "c", e) for e in ([1.0, 1.1], [-1.0, -1.1], [1.0, -1.0]))
    assert all_of("f", "c", [good, good]).verdict == "reproduced"
    assert all_of("f", "c", [good, open_]).verdict == "undecided"
    assert all_of("f", "c", [good, open_, bad]).verdict == "not reproduced"
    assert all_of("f", "c", [good, bad]).effect == pytest.approx(-1.05)
    near, far = larger("f", "c", [0.1, 0.11]), larger("f", "c", [9.0, -1.0])
    assert all_of("f", "c", [near, far]).effect == pytest.approx(4.0)  # of what is undecided, not of what is least


def test_the_claims_point_the_right_way() -> None:
    """FedCluster with half of FedAvg's loss all along is faster by ln 2; on CIFAR-10 by more."""
    histories = {}
    for figure, data, factor in (("fig2", "cifar10", 4.0), ("fig3", "mnist", 2.0)):
        for panel in panels(figure, "standard"):
            for curve in panel.curves:
                loss = 1.0 / factor if curve.method == "fedcluster" else 1.0
                runs = [history(3.0, loss * noise, loss) for noise in (1.0, 1.01, 0.99)]
                histories[data, f"{figure} {panel.title}", curve.label] = runs
    verdicts = {v.claim: v for v in judge(histories)}
    every = verdicts["MNIST: FedCluster is faster at every ρ_device"]
    assert every.verdict == "reproduced"
    assert every.effect == pytest.approx(np.log(2), abs=0.02)
    more = verdicts["the advantage over FedAvg is larger on CIFAR-10 than on MNIST"]
    assert more.verdict == "reproduced"
    assert more.effect == pytest.approx(np.log(2), abs=0.02)
    flipped = {
        (data, panel, {"FedAvg": "FedCluster", "FedCluster": "FedAvg"}.get(label, label)): runs
        for (data, panel, label), runs in histories.items()
    }
    assert {v.verdict for v in judge(flipped)} == {"not reproduced"}


LOSSES = {"FedAvg": 1.0, "FedCluster": 0.5, "M = 5": 0.95, "M = 10": 0.8, "M = 20": 0.6}
LOSSES |= {"ρ_cluster = 0.1": 0.5, "ρ_cluster = 0.5": 0.6, "ρ_cluster = 0.9": 0.7}


@pytest.mark.parametrize(("turned", "verdict"), [(False, "reproduced"), (True, "not reproduced")])
def test_optimizers_and_clusters_are_judged_the_right_way(turned: bool, verdict: str) -> None:
    """As the paper has it all is reproduced, the other way round nothing."""
    histories = {}
    for panel in (panel for figure in ("fig4", "fig5", "fig6") for panel in panels(figure, "standard")):
        for curve in panel.curves:
            loss = LOSSES[curve.label.split(", ")[-1]]
            runs = [history(3.0, *[(1 / loss if turned else loss) * noise] * 2) for noise in (1.0, 1.001, 0.999)]
            histories[panel.data, f"{panel.figure} {panel.title}", curve.label] = runs
    verdicts = judge(histories)
    assert len(verdicts) == 14 + 6 + 14
    like = [v for v in verdicts if "comparable" in v.claim]
    assert [v.verdict for v in like] == ["reproduced"]  # 0.95 is as near to 1 from below as from above
    assert {v.verdict for v in verdicts if v not in like} == {verdict}
    ten = next(v for v in verdicts if v.claim == "CIFAR-10: M = 20 is faster than M = 10")
    assert abs(ten.effect) == pytest.approx(np.log(0.8 / 0.6), abs=0.01)


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files like MNIST's with a few hundred pictures, and a scale that trains in a second."""
    import datasets

    rng = np.random.default_rng(0)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    for split, rows in (("train", 400), ("test", 100)):
        label = rng.integers(10, size=rows)
        image = [np.clip(rng.normal(100 + 12 * c, 30, (8, 8)), 0, 255).astype(np.uint8) for c in label]
        data = datasets.Dataset.from_dict({"image": image, "label": label}, features=kinds)
        data.to_parquet(tmp_path / "data" / "mnist" / f"{split}.parquet")
    monkeypatch.setenv("FEDCLUSTER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(choices.SCALES, "quick", choices.Scale("logistic", {"mnist": 2}, 2))
    monkeypatch.setattr("fedcluster.training.executors.processes.cores", lambda: 1)


def test_from_one_command(small_mnist: None, here: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said, err = here("reproduce", "fig6", "--out", out)
    assert code == 0, err
    assert "8 runs to do, about" in err
    assert "smaller ρ_cluster is faster" in said
    with (out / "fig6.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 2 * 3  # curves, seeds, rounds with the start
    assert {row["lr"] for row in rows} == {"0.05", "0.005"}
    verdicts = json.loads((out / "verdicts.json").read_text())
    assert len(verdicts["claims"]) == 7
    assert (out / "fig6.png").stat().st_size > 20_000
    beside = (out / "choices.md").read_text()
    assert "Rounds: 2 on MNIST." in beside
    assert "Seeds: 0, 1." in beside
    assert "FedAvg's divided by M" in beside
    code, again, err = here("reproduce", "fig6", "--out", out, "--x", "bytes", "--html", tmp_path / "page.html")
    assert "runs to do" not in err
    assert f"fig6 is plotted from {out}/fig6.csv" in err
    assert again == f"{said}Page saved to {tmp_path}/page.html\n"
    page = data_in(tmp_path / "page.html")
    assert (len(page["runs"]), len({run["group"] for run in page["runs"]}), len(page["pictures"])) == (8, 4, 1)
    assert (out / "fig6-bytes.png").stat().st_size > 20_000


def test_the_questions_point_the_right_way() -> None:
    """Half of FedAvg's loss with small cohorts, a quarter with clusters where devices differ most, else half, too."""
    histories = {}
    for panel in panels("fig3", "standard"):
        for curve in panel.curves:
            loss = {"fedcluster": 0.25 if "0.9" in panel.title else 0.5, "control": 0.5}.get(curve.method, 1.0)
            runs = [history(3.0, loss * noise, loss) for noise in (1.0, 1.01, 0.99)]
            histories["mnist", f"fig3 {panel.title}", curve.label] = runs
    cohorts, clusters, grows, errors, last = questions(histories)
    assert [v.verdict for v in (cohorts, clusters, grows, errors, last)] == ["yes"] * 5
    assert cohorts.effect == pytest.approx(np.log(2), abs=0.02)
    assert clusters.effect == pytest.approx(np.log(2) / 4, abs=0.02)
    assert grows.effect == pytest.approx(np.log(2), abs=0.02)
    assert errors.effect == pytest.approx(np.log(2), abs=0.02)
    assert last.effect == pytest.approx(np.log(2))


def test_an_advantage_can_be_lost_by_the_end() -> None:
    ours, theirs = history(3.0, 0.5, 0.4, 0.4), history(3.0, 2.0, 1.6, 0.2)
    assert advantage(ours, theirs) == pytest.approx(np.log(2))
    assert fewer_errors(ours, theirs) == pytest.approx(np.log(2))
    assert last_advantage(ours, theirs) == pytest.approx(-np.log(2))
    histories = {}
    for panel in panels("fig4", "quick"):
        for curve in panel.curves:
            crossing = "Adam" in panel.title and curve.method == "fedcluster"
            end = {"fedavg": 1.0, "fedcluster": 2.0 if crossing else 0.5}[curve.method]
            start = 1.0 if curve.method == "fedavg" else 0.1
            runs = [history(3.0, start * noise, end * noise) for noise in (1.0, 1.01, 0.99)]
            histories["mnist", f"fig4 {panel.title}", curve.label] = runs
    assert {v.verdict for v in judge(histories)} == {"reproduced"}
    [last] = questions(histories)
    assert last.verdict == "no"
    assert last.effect == pytest.approx(-np.log(2))


def test_figures_are_judged_together(small_mnist: None, here: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, first, err = here("reproduce", "fig6", "--out", out)
    assert code == 0, err
    code, both, err = here("reproduce", "fig5", "--out", out)
    assert code == 0, err
    assert "smaller ρ_cluster is faster" in both
    assert "5 clusters are comparable" in both
    assert "5 clusters are comparable" not in first
    code, _, err = here("reproduce", "fig6", "--out", out, "--seeds", 1)
    assert code == 2
    assert "choose another folder" in err
    whole = (out / "fig6.csv").read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace("mnist", "mnist,", 1), whole[:40], "", whole + "a,b\n"):
        (out / "fig6.csv").write_text(damaged)
        code, _, err = here("reproduce", "fig5", "--out", out)
        assert code != 0
        assert "fig6.csv is damaged" in err
        assert "Traceback" not in err
    (out / "fig6.csv").unlink()
    code, again, err = here("reproduce", "fig6", "--out", out)
    assert "0 runs to do" in err
    assert again == both
    assert (out / "fig6.csv").read_text() == whole


def test_a_figure_is_drawn_from_its_data_alone(small_mnist: None, here: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, said, _ = here("reproduce", "fig6", "--out", out)
    picture = (out / "fig6.png").read_bytes()
    shutil.rmtree(out / "runs")
    (out / "fig6.png").unlink()
    code, again, err = here("reproduce", "fig6", "--out", out)
    assert (code, again) == (0, said), err
    assert (out / "fig6.png").read_bytes() == picture
    assert not (out / "runs").exists()
    (out / "fig5.csv").write_text((out / "fig6.csv").read_text())
    code, _, err = here("reproduce", "fig5", "--out", out)
    assert code != 0
    assert "fig5.csv has other curves or seeds: delete it, and reproduce fig5 again" in err


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    panel = panels("fig6", "quick")[0]
    line = {"aggregations": 3, "train_loss": 0.5, "test_loss": 0.25, "test_accuracy": 0.75}
    curves = [[{"round": j} | line for j in range(3)] for _ in range(2)]
    path = tmp_path / "fig6.csv"
    path.write_text(table.to_csv([panel], {(panel, curve): curves for curve in panel.curves}, lambda _, __: 0.1))
    found = table.read(path)
    assert list(found) == [("mnist", f"fig6 {panel.title}", curve.label) for curve in panel.curves]
    sent = {"device_updates": 0, "bytes_up": 0, "bytes_down": 0}
    assert all(runs == [[one | sent for one in lines] for lines in curves] for runs in found.values())


def test_tuned_and_left_out(small_mnist: None, here: Any, tmp_path: Path) -> None:
    code, _, err = here("reproduce", "fig6", "--lr", "tuned", "--seeds", 1, "--out", tmp_path / "out")
    assert code == 0, err
    with (tmp_path / "out" / "fig6.csv").open() as file:
        taken = {(row["curve"], float(row["lr"])) for row in csv.DictReader(file)}
    assert len(taken) == 4
    panel = panels("fig6", "quick")[0]
    for curve in panel.curves:
        [lr] = [lr for label, lr in taken if label == curve.label]
        step = next(step for step in range(-12, 13) if rate(0.05, step) == lr)
        for tried, seed in product((step - 1, step, step + 1), TUNING_SEEDS):  # a worse rate on either side
            tuning = experiment(panel, curve, "quick", "paper", seed).override(**{"local.lr": rate(0.05, tried)})
            assert (tmp_path / "out" / "runs" / job(tuning).name).exists()
    assert "Every curve has its own best" in (tmp_path / "out" / "choices.md").read_text()
    code, _, err = here("reproduce", "fig2", "--out", tmp_path / "other")
    assert "fig2 needs CIFAR-10, which is not part of scale quick" in err


def test_bad_words_are_named(here: Any) -> None:
    code, _, err = here("reproduce", "fig9")
    assert code == 2
    assert "is not one of 'fig2', 'fig3'" in " ".join(err.replace("│", " ").split())
    code, _, err = here("reproduce", "fig3", "--seeds", 0)
    assert code == 2
    assert "0 is not in the range" in err


def test_a_run_that_diverged_stands_where_it_began(tmp_path: Path) -> None:
    from fedcluster.errors import Diverged

    (tmp_path / "run.json").write_text('{"start": {"train_loss": 2.3, "test_accuracy": 0.1}}')
    (tmp_path / "experiment.toml").write_text("rounds = 3")
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "train_loss": 9.0, "test_accuracy": 0.1, "uploads": 7}\n')
    said: list[str] = []
    lines = complete(Diverged("too fast"), tmp_path, FEDAVG, said.append)
    assert [line["train_loss"] for line in lines] == [2.3, 9.0, 2.3, 2.3]
    assert lines[-1]["uploads"] == 7
    assert "FedAvg diverged" in said[0]
