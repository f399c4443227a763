"""What a report reads from folders, and that a page is made of whatever is there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcluster
from fedcluster.errors import BadRun
from fedcluster.report import page
from fedcluster.report.collect import collect, collect_run, cycle_columns, find_runs, short
from fedcluster.runs.progress import Display
from tests.conftest import Here
from tests.report.folders import cycle_line, data_of_page, write_lines, write_run

KEYS: dict[str, Any] = {
    "rounds": 3,
    "fleet": {"devices": 12, "samples": 20, "test_share": 0.2},
    "clusters": {"count": 3, "participation": 0.5},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
    "eval": {"every": 1},
}


DAMAGED = [b"", b"\xff\xfe", b"[1, 2]", b"{}", b'{"round": 1}']
DAMAGED += [b'{"round": 1, "clusters": 7, "by_device": [], "cohort": 3, "names": [1]}']
DAMAGED += [b'{"round": 1, "train_loss": NaN, "reasons": [[1]], "moved": "far", "missing": {"a": 1}, "start": [1]}']


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    fedcluster.run(fedcluster.Experiment(**KEYS), folder, display=Display())
    return folder


def test_everything_that_a_run_writes_is_there(trained: Path) -> None:
    run = collect_run(trained, "run")
    assert run["rounds"]["round"] == [0, 1, 2, 3]
    assert run["rounds"]["train_loss"][0] > run["rounds"]["train_loss"][-1]
    assert run["rounds"]["device_accuracy_worst"][0] is None  # devices score from round 1 on
    assert run["axes"]["updates"] == [0, 6, 12, 18]
    assert run["axes"]["gradients"] == [0, 18, 36, 54]
    assert [sorted(run["cycles"]["cluster"][j : j + 3]) for j in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert run["cycles"]["cosine"][0] is None
    assert all(-1 <= cosine <= 1 for cosine in run["cycles"]["cosine"][1:])
    assert all(moved > 0 for moved in run["cycles"]["moved"])
    assert sum(row["devices"] for row in run["fleet"]["clusters"]) == 12
    assert np.allclose(np.sum(run["fleet"]["class_shares"], axis=1), 1, atol=0.01)
    worst = run["devices"]["scores"][1]["worst"]
    assert (run["devices"]["devices"], len(worst)) == (12, 12)
    assert [row[3] for row in worst] == sorted(row[3] for row in worst)  # of accuracies, the lowest first
    assert run["state"] == "finished"
    assert run["environment"]["fedcluster"] == fedcluster.__version__
    assert run["command"].endswith("run/experiment.toml")


def test_the_command_writes_one_file_that_needs_no_other(trained: Path, here: Here, tmp_path: Path) -> None:
    code, out, _ = here("report", trained, "-o", tmp_path / "page" / "out.html")
    assert (code, out) == (0, f"Report saved to {tmp_path}/page/out.html\n")
    html = (tmp_path / "page" / "out.html").read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', html)
    assert data_of_page(html)["runs"][0]["rounds"]["round"] == [0, 1, 2, 3]


def test_a_comparison_is_reported_by_its_folder(tmp_path: Path, here: Here) -> None:
    for seed in range(2):
        write_run(tmp_path / "both" / f"fedavg-seed{seed}", seed=seed)
    write_run(tmp_path / "both" / "fedcluster-seed0")
    found = find_runs([tmp_path / "both"])
    assert [run["group"] for run in collect(found)] == ["FedAvg", "FedAvg", "FedCluster"]
    assert find_runs([tmp_path / "both", tmp_path / "both" / "fedavg-seed1"]) == found
    code, _, err = here("report", tmp_path / "nothing")
    hint = "name the folder that run --out wrote, or one that holds several"
    assert (code, err.splitlines()[1:]) == (5, [f"fedcluster: {tmp_path}/nothing is not a folder: {hint}"])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / where / "run", rounds=2) for where in ("a", "b")]
    assert [run["name"] for run in collect(runs)] == ["a/run", "b/run"]


def test_an_older_run_is_shown_without_what_it_did_not_write(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old")
    (folder / "fleet.json").unlink()
    lines = [{k: v for k, v in cycle_line(1, K, 1, 0, []).items() if k not in ("moved", "cosine")} for K in range(3)]
    write_lines(folder / "cycles.jsonl", lines)
    run = collect_run(folder, "old")
    assert (run["fleet"], run["cycles"]["moved"]) == ({}, [None] * 3)
    assert page.page(page.data_of(page.Content("old", runs=[folder])))


@pytest.mark.parametrize("name", ["run.json", "fleet.json", "experiment.toml", "metrics.jsonl", "cycles.jsonl"])
@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_leaves_a_page_without_it(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    (folder / name).write_bytes(content)
    data_of_page(page.page(page.data_of(page.Content("run", runs=[folder]))))


def test_no_text_ends_the_element_that_holds_the_data() -> None:
    hostile = "</script><script>alert(1)</script><!-- & {{data}} \u2028"
    html = page.render(page.encode({"name": hostile}, 6))
    assert data_of_page(html) == {"name": hostile}
    assert html.count("<script>") == len(page.SCRIPTS)
    assert "<!--" not in html.split('id="data">')[1].split("</script>")[0]


def test_long_columns_travel_in_short_and_floats_rounded() -> None:
    assert page.compact([0, 40, 80, 120, 160, 200, 240, 280], 4) == {"from": 0, "by": 40, "length": 8}
    assert page.compact([0, 1, 2], 4) == [0, 1, 2]
    assert page.compact([1 / 3, float("nan"), None, True], 4) == [0.3333, None, None, True]


def test_many_runs_stay_below_three_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / f"run{seed}", rounds=60, seed=seed) for seed in range(6)]
    whole = page.data_of(page.Content("many", runs=runs))
    monkeypatch.setattr(page, "LARGEST", len(page.render("")) + 70_000)
    html = page.page(whole)
    assert len(html) <= page.LARGEST
    thinned = data_of_page(html)
    assert thinned["every"] > 1
    last = whole["runs"][0]["rounds"]["train_loss"][-1]
    assert thinned["runs"][0]["rounds"]["train_loss"][-1] == pytest.approx(last, rel=1e-3)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRun, match="has no run in it"):
        find_runs([tmp_path])


def test_every_kind_of_failed_cycle_counts_as_failed() -> None:
    remarks: list[dict[str, Any]] = [{}, {"failed": True}, {"undone": "why"}, {"too_few": 1}, {"no_sum": "why"}]
    remarks += [{"changed": False}, {"changed": True}]  # all of its updates were refused
    lines = [{"round": 1, "cycle": number, **remark} for number, remark in enumerate(remarks)]
    assert cycle_columns(lines, 100)["failed"] == [0, 1, 1, 1, 1, 1, 0]


def test_the_state_of_a_run_is_that_of_the_list_of_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    assert (collect_run(folder, "run")["state"], collect_run(folder, "run")["reason"]) == ("finished", "")
    (folder / "model.safetensors").unlink()
    assert collect_run(folder, "run")["state"] == "interrupted"
    (folder / "diverged.txt").write_text("round 3: lower local.lr\n")
    run = collect_run(folder, "run")
    assert (run["state"], run["reason"]) == ("diverged", "round 3: lower local.lr")


def test_malicious_updates_are_counted_with_those_that_were_stopped(tmp_path: Path) -> None:
    line = cycle_line(1, 0, 1.0, 0.5, [])
    line |= {"malicious": [1, 2, 3], "reasons": [[1, "too far"]], "discarded": [[2, "cut"], [7, "cut"]]}
    write_lines(write_run(tmp_path / "run", rounds=1) / "cycles.jsonl", [line])
    assert collect_run(tmp_path / "run", "run")["events"]["malicious"] == {"sent": 3, "stopped": 2, "honest": 1}


def test_values_are_written_as_in_toml() -> None:
    assert [short(value) for value in (True, ["a", 1.5], "text", 1e-4)] == ["true", "[a, 1.5]", "text", "0.0001"]
