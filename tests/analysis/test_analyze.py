"""analyze and advise as a person types them, and clusters made from gradients."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedcluster
from fedcluster.analysis import advise, advise_report, analyze
from fedcluster.analysis.smoothness import smoothness
from fedcluster.cli.grid import Grid
from fedcluster.experiment import load
from fedcluster.models.flat_model import FlatModel
from fedcluster.reporting import untracked
from fedcluster.runs.progress import Display
from fedcluster.training.setup import prepare
from fedcluster.training.threads import repeatable
from tests.conftest import Here, blobs
from tests.report.folders import data_in

Write = Callable[..., Path]


def test_analyze_says_what_fails_first_and_adds_up(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    assert here("run", write_experiment(), "--out", "run")[0] == 0
    code, text, _ = here("analyze", write_experiment(), "--at", "run", "--out", "out", "--html", "page.html")
    assert code == 0
    page = data_in(tmp_path / "page.html")
    assert (page["sentences"][0] in text, len(page["tables"]), len(page["pictures"])) == (True, 3, 1)
    assert text.startswith(
        "The theorem's conditions do not hold on this problem, so its bound guarantees nothing here."
    )
    assert "too large by a factor of" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("  ")) <= 80
    for word in ("H_device", "H_cluster", "run, round 3", "largest seen", "M = 3", "M = 1", "rounds to epsilon"):
        assert word in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"analysis.json", "analysis.png"}
    report = json.loads((tmp_path / "out" / "analysis.json").read_text())
    names = [point["name"] for point in report["points"]]  # on a slow machine with checkpoints in between
    assert (names[0], names[-1]) == ("start", "run, round 3")
    assert len(set(names)) == len(names)
    for point in report["points"]:
        assert point["H_within"] + point["H_cluster"] == pytest.approx(point["H_device"])
        assert 0 < point["H_cluster"] < point["H_device"]
        assert point["sketched"] == pytest.approx(point["H_cluster"], rel=1e-4)  # 650 numbers are their own sketch
        assert point["G2"] > point["s2_max"] > 0
        assert point["V"] > point["V_one"] > 0
    most = report["largest_seen"]
    assert most["L"] == max(point["L"] for point in report["points"])
    assert report["lowest_loss_known"] < report["f_start"]
    clustered, one = report["theorem"]
    assert clustered["C"] == pytest.approx(2 * report["f_start"] + 4 * most["L"] * (most["H_cluster"] + most["V"]))
    assert one["C"] == pytest.approx(2 * report["f_start"] + 4 * most["L"] * most["V_one"])
    assert clustered["bound"] == pytest.approx(2 * clustered["C"] / (3 * 3 * 3) ** 0.5)  # T = M = E = 3


def test_models_are_found_in_folders_checkpoints_and_files(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    assert here("run", write_experiment(), "--out", "run")[0] == 0
    setup = prepare(load(write_experiment()))
    newest = max((tmp_path / "run" / "checkpoint").glob("*.json"))
    *_, (_, folder) = analyze.models_at(tmp_path / "run", setup, setup.flat_model)
    (name, stored), *_ = analyze.models_at(newest, setup, setup.flat_model)
    (_, tensors), *_ = analyze.models_at(newest.with_suffix(".safetensors"), setup, setup.flat_model)
    (_, file), *_ = analyze.models_at(tmp_path / "run" / "model.safetensors", setup, setup.flat_model)
    assert name == "run, round 3"
    assert torch.equal(folder, file)
    assert torch.equal(stored, file)
    assert torch.equal(tensors, file)
    (tmp_path / "run" / "model.safetensors").unlink()
    assert torch.equal(analyze.models_at(tmp_path / "run", setup, setup.flat_model)[-1][1], file)


def test_bad_words_end_in_one_sentence(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    assert here("run", write_experiment(), "--out", "run")[0] == 0
    newest = max((tmp_path / "run" / "checkpoint").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x7f")
    (tmp_path / "empty").mkdir()
    for words, code, said in (
        (["--at", newest.with_suffix(".json")], 3, "torn or altered"),
        (["--at", "none.safetensors"], 3, "--at: there is no file none.safetensors"),
        (["--at", "empty"], 3, "holds neither a model.safetensors nor a checkpoint"),
        (["--at", "run/model.safetensors", "-o", "model.name=mlp"], 3, "must have the tensors"),
        (["--epsilon", "0"], 2, "--epsilon must be above 0"),
    ):
        ended, _, err = here("analyze", write_experiment(), "--out", "out", *words)
        assert (ended, said in " ".join(err.replace("│", " ").split())) == (code, True), err
    path = write_experiment(clusters={"method": "file", "path": "clusters.csv"})
    ended, _, err = here("advise", path)
    assert (ended, "fixes M" in err) == (2, True)


def test_what_the_experiment_does_otherwise_is_said(write_experiment: Write) -> None:
    path = write_experiment(
        local={"steps": 3, "batch": 5, "algorithm": "fedmax", "optimizer": "adam"},
        clusters={"count": 3, "order": "cyclic", "participation": 0.5},
    )
    said = " ".join(analyze.analyze(load(path)).remarks)
    for word in (
        "this experiment uses fedmax with adam",
        'this experiment has clusters.order = "cyclic"',
        "Here 6 of 12 take part in a round",
    ):
        assert word in said
    plain = load(write_experiment(clusters={"count": 3, "participation": 1.0}))
    assert analyze.analyze(plain).remarks == []


@pytest.mark.parametrize("clusters", [{"method": "redrawn"}, {"method": "availability", "soft": True}])
def test_clusters_that_change_are_said_to_be_measured_in_the_first_round(
    clusters: dict[str, Any], write_experiment: Write
) -> None:
    world = {"devices": 12, "samples": 20} | ({"world": "diurnal"} if "soft" in clusters else {})
    path = write_experiment(fleet=world, clusters={"count": 3, "participation": 1.0} | clusters)
    assert "those of the first round are measured" in " ".join(analyze.analyze(load(path)).remarks)
    fixed = write_experiment(clusters={"count": 3, "participation": 1.0})
    assert "first round" not in " ".join(analyze.analyze(load(fixed)).remarks)


def test_unequal_clusters_are_said_to_minimise_another_mean(
    here: Here, write_experiment: Write, tmp_path: Path
) -> None:
    """Ten of twelve equal devices in one cluster: q = 5/6 and 1/6."""
    rows = [f"{k},{int(k > 9)}" for k in range(12)]
    (tmp_path / "clusters.csv").write_text("device,cluster\n" + "\n".join(rows) + "\n")
    said = "Clusters hold from 16.67% to 83.33% of the samples"
    for clusters, expected in (({"method": "file", "path": "clusters.csv"}, True), ({"count": 3}, False)):
        path = write_experiment(clusters=clusters)
        _, _, err = here("run", path, "--out", f"run-{expected}")
        _, text, _ = here("analyze", path, "--out", "analysis")
        assert (said in err, said in text) == (expected, expected)
    (tmp_path / "fleet.csv").write_text("device,utc_offset,samples\na,1,60\nb,2,30\nc,9,10\n")
    assert "from 10.00% to 60.00% of the samples" in here("plan", "fleet.csv", "--count", "3", "--out", "plan")[1]
    (tmp_path / "fleet.csv").write_text("device,utc_offset\na,1\nb,2\nc,9\n")
    assert "from 33.33% to 66.67% of the devices" in here("plan", "fleet.csv", "--count", "2", "--out", "plan")[1]
    assert "Clusters hold" not in here("plan", "fleet.csv", "--count", "3", "--out", "plan")[1]


def test_full_batches_have_no_variance_and_the_conditions_can_hold(write_experiment: Write) -> None:
    path = write_experiment(
        rounds=10**6, fleet={"partition": "iid", "devices": 4, "samples": 1438}, local={"steps": 1, "batch": "full"}
    )
    found = analyze.analyze(load(path, ["clusters.count=1"]))
    assert found.largest.V == found.largest.s2_mean == 0
    assert found.largest.H_device < 1e-6 * found.largest.gradient  # everybody holds the whole data set
    assert found.one.conditions[1].holds


def test_advise_draws_the_curve_and_pilots_check_it(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    code, text, err = here("advise", write_experiment(), "--out", "out", "--pilot")
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "advice.json").read_text())
    candidates = report["candidates"]
    assert [candidate["M"] for candidate in candidates] == [1, 2, 3, 4, 6]  # six of twelve take part: no more
    assert candidates[0]["H_cluster"] == pytest.approx(0, abs=1e-12)
    scores = {candidate["M"]: candidate["C_cohort"] / candidate["M"] ** 0.5 for candidate in candidates}
    best = sorted(scores, key=scores.__getitem__)[:3]
    assert [pilot["M"] for pilot in report["pilots"]] == best
    assert report["recommended"] == min(report["pilots"], key=lambda pilot: pilot["loss"])["M"]
    assert f"Recommended: M = {report['recommended']}." in text
    assert ("agree:" in text) == (report["recommended"] == best[0])
    assert ('server.optimizer = "round_momentum"' in text) == (report["recommended"] > 1)
    H = {candidate["name"]: candidate["H_cluster"] for candidate in report["alternatives"]}
    assert H["balanced, by gradients"] <= H["random"] <= H["similar, by labels"]
    assert (tmp_path / "out" / "advice.png").exists()


def test_every_M_has_the_same_budget_and_others_are_left_out(write_experiment: Write) -> None:
    path = write_experiment(fleet={"devices": 24, "samples": 20}, clusters={"count": 3, "participation": 0.5})
    advice = advise.advise(load(path))
    assert [candidate.M for candidate in advice.candidates] == [1, 2, 3, 4, 6, 8, 12]
    assert {round(candidate.M * candidate.cohort) for candidate in advice.candidates} == {12}
    lopsided = advise.advise(load(path).override(**{"clusters.method": one_large_cluster}))
    assert [candidate.M for candidate in lopsided.candidates] == [1, 2]
    assert "M = 12 is left out: its cohorts have 17 devices a round and those of one cluster 12" in " ".join(
        lopsided.remarks
    )


def test_the_tables_of_advice_fit_into_80_columns() -> None:
    values = {
        "cohort": 12.5,
        "H_cluster": 0.000314159,
        "error": 0.01,
        "sampling": 0.0123456,
        "V": 0.000654321,
        "G2": 1.0,
    }
    at = [advise.Candidate(f"M = {M}", M, **values, C=0.123456, C_cohort=0.234567, C_low=0.1) for M in (10, 1000)]
    other = [replace(at[0], name="balanced, by gradients"), replace(at[0], name="random")]
    for candidates, first in ((at, "availability"), (at, "my.package.clusters:function"), (other, "at M = 1000")):
        table = Grid(*advise_report.table(candidates, first)).render()
        assert Console(width=200).measure(table).maximum <= 80


def one_large_cluster(fleet: Any, rng: Any, options: Any) -> Any:
    return np.maximum(0, np.arange(len(fleet)) - len(fleet) + options.count)


def test_one_cluster_is_not_compared_with_itself(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    path = write_experiment(clusters={"count": 1, "participation": 0.05})
    code, text, _ = here("advise", path, "--out", "out", "--html", "page.html")
    assert (code, "Recommended: M = 1." in text) == (0, True)
    assert "Recommended: M = 1." in data_in(tmp_path / "page.html")["sentences"]
    assert "With one cluster there is nothing to choose between clusterings, and H_cluster is 0." in text
    assert "round_momentum" not in text
    assert json.loads((tmp_path / "out" / "advice.json").read_text())["alternatives"] == []
    assert max(len(line) for line in text.splitlines() if line.startswith("  ")) <= 80


def test_the_advised_M_does_not_change_with_the_seed_of_the_estimate(write_experiment: Write) -> None:
    path = write_experiment(fleet={"devices": 24, "samples": 30}, clusters={"count": 3, "participation": 0.5})
    experiment = load(path)
    with repeatable():
        evaluate = advise.survey_fleet(experiment, Display(), 1)
        setup, local = evaluate.setup, experiment.local
        assert setup.dataset is not None
        assert setup.partition is not None
        flat_models, w = [FlatModel(setup.flat_model.module)], setup.start.model
        recommended, ranges = set(), []
        for seed in range(4):
            devices = np.arange(24)
            evaluate.L = smoothness(flat_models, w, setup.dataset, setup.partition, devices, local, seed, untracked)
            ranges.append(evaluate.L)
            counts = advise.cluster_counts(24, 0.5)
            candidates = [evaluate(str(M), experiment.clusters.model_copy(update={"count": M})) for M in counts]
            recommended.add(min(candidates, key=lambda candidate: candidate.cohort_score).M)
    assert len(recommended) == 1
    assert max(L.low for L in ranges) <= 1.01 * min(L.low for L in ranges)
    assert max(L.low for L in ranges) <= min(L.high for L in ranges)


def test_large_fleets_are_sampled_and_say_so(
    here: Here, write_experiment: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcluster.analysis.measures.MAX_SURVEYED", 40)
    path = write_experiment(fleet={"devices": 60, "samples": 10}, clusters={"count": 3, "participation": 0.5})
    code, text, err = here("analyze", path, "--out", "out")
    assert code == 0, err
    assert "40 of 60 devices were surveyed" in text
    assert "at most 7.22% of all devices have a larger one" in text  # 1 - 0.05^(1/40)
    point = json.loads((tmp_path / "out" / "analysis.json").read_text())["points"][0]
    monkeypatch.setattr("fedcluster.analysis.measures.MAX_SURVEYED", 100)
    whole = analyze.analyze(load(path)).points[0]
    assert point["H_device"] == pytest.approx(whole.H_device, rel=0.2)
    assert abs(point["H_cluster"] - whole.H_cluster) <= 4 * point["error"]
    assert abs(point["V"] - whole.V) <= 4 * point["V_error"]
    monkeypatch.setattr("fedcluster.analysis.measures.MAX_SURVEYED", 40)
    advice = advise.advise(load(path))
    assert "40 of 60 devices were surveyed" in advice.remarks[0]
    alternatives = [candidate.name for candidate in advice.alternatives]
    assert alternatives == ["random", "balanced, by labels", "similar, by labels"]
    assert "needs the gradients of all 60 devices" in advice.remarks[-1]


def test_advise_without_pilots_says_so_and_leaves_out_what_is_impossible(write_experiment: Write) -> None:
    path = write_experiment(clusters={"method": "major_class", "rho_cluster": 1.0, "participation": 1.0})
    experiment = load(path, ["fleet.devices=20"])
    advice = advise.advise(experiment)
    assert [candidate.M for candidate in advice.candidates] == [10, 20]  # two devices of each of ten classes
    assert "M = 1 is left out" in advice.remarks[0]
    assert "--pilot checks it" in " ".join(advise_report.verdict(advice, 1.0))
    assert advice.round_momentum
    assert not advise.advise(experiment.override(**{"server.optimizer": "avgm"})).round_momentum


@pytest.mark.parametrize(
    ("devices", "participation", "expected"),
    [
        (1000, 0.1, [1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100]),
        (1009, 0.1, [1, 2, 5, 10, 20, 50, 100]),
        (10, 0.05, [1]),
        (7, 1.0, [1, 2, 5]),
    ],
)
def test_values_of_M(devices: int, participation: float, expected: list[int]) -> None:
    assert advise.cluster_counts(devices, participation) == expected


def test_many_divisors_are_thinned_out_between_both_ends() -> None:
    counts = advise.cluster_counts(5040, 1.0)
    assert len(counts) == advise.MAX_COUNTS
    assert (counts[0], counts[-1]) == (1, 5040)


def test_clusters_from_gradients_are_repeatable_and_better(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **blobs(devices=24))
    keys: dict[str, Any] = {"data": {"name": "data.npz"}, "fleet": {"partition": "natural"}}
    H = {}
    for method, features in (("random", "labels"), ("balanced", "gradients"), ("similar", "gradients")):
        chosen = {"method": method, "features": features, "count": 4}
        path = write_experiment(f"{method}.toml", **keys, clusters=chosen)
        H[method] = analyze.analyze(load(path)).largest.H_cluster
        assert here("run", path, "--out", method)[0] == 0
        assert here("partition", path, "--out", f"{method}-partition")[0] == 0
        once, again = (prepare(load(path)).clusters.assignment for _ in range(2))
        assert (once == again).all()
    assert H["balanced"] < 0.5 * H["random"] < 0.5 * H["similar"]
    code, _, err = here("run", tmp_path / "balanced.toml", "--out", "balanced", "--resume")
    assert (code, "nothing to do" in err) == (0, True)


def test_the_start_is_untouched_by_gradients_for_clusters(write_experiment: Write) -> None:
    """A model with dropout trains the same whether or not its gradients were looked at before."""
    path = write_experiment(model={"name": "tests.analysis.test_analyze:Dropping"})
    by_labels = load(path, ["clusters.method=balanced", "clusters.count=1"])
    by_gradients = load(path, ["clusters.method=balanced", "clusters.count=1", "clusters.features=gradients"])
    first, second = (fedcluster.run(one, display=Display()).history[-1] for one in (by_labels, by_gradients))
    assert first["train_loss"] == second["train_loss"]


class Dropping(torch.nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        size = int(np.prod(shape))
        super().__init__(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(size, classes))


def test_a_fleet_with_devices_in_no_cluster_is_refused_in_a_sentence(
    here: Here, write_experiment: Write, tmp_path: Path
) -> None:
    rows = [f"{k},{'none' if k == 4 else k % 2}" for k in range(12)]
    (tmp_path / "clusters.csv").write_text("device,cluster\n" + "\n".join(rows) + "\n")
    path = write_experiment(clusters={"method": "file", "path": str(tmp_path / "clusters.csv")})
    code, _, error = here("analyze", path, "--out", "out")
    assert code == 2
    assert "1 of 12 devices are in no cluster" in error
    assert not (tmp_path / "out").exists()
