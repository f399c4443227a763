"""The commands as a person types them: what they write, and how they fail."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedcluster
from tests.conftest import Here, Run, blobs, until
from tests.report.folders import data_in

Write = Callable[..., Path]
COUNTS = ["aggregations", "device_updates", "downloads", "uploads", "bytes_down", "bytes_up"]


def test_run_writes_everything(cli: Run, here: Here, write_experiment: Write, tmp_path: Path) -> None:
    done = cli("run", write_experiment(), "--out", "out", "-o", "clusters.count=4", "-o", "local.algorithm=fedprox")
    assert done.returncode == 0, done.stderr
    assert "logistic with 650 parameters on digits: 12 devices in 4 clusters" in done.stdout
    out = tmp_path / "out"
    names = {"experiment.toml", "run.json", "metrics.jsonl", "cycles.jsonl", "fleet.json", "model.safetensors"}
    names |= {"curves.png"}
    assert names | {"checkpoint", ".lock"} == {path.name for path in out.iterdir()}
    resolved = fedcluster.load(out / "experiment.toml")
    assert (resolved.clusters.count, resolved.algorithm.name, resolved.local.eps) == (4, "fedprox", 1e-8)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    cohort = 6  # half of twelve devices: one or two of each cluster's three
    one = 650 * 4
    assert [lines[1][key] for key in COUNTS] == [8, *[2 * cohort] * 3, *[2 * cohort * one] * 2]
    assert all(0 < line["seconds"] <= line["elapsed"] for line in lines)
    assert {"train_loss", "test_loss", "test_accuracy"} <= lines[0].keys()
    assert {name: list(t.shape) for name, t in load_file(out / "model.safetensors").items()} == {
        "linear.weight": [10, 64],
        "linear.bias": [10],
    }
    again = ["run", write_experiment(), "--out", "out", "--resume"]
    code, _, err = here(*again, "-o", "clusters.count=4", "-o", "local.algorithm=fedprox")
    assert (code, "nothing to do" in err) == (0, True)
    code, _, err = here(*again)
    assert (code, "clusters.count (was 4, now 3)" in err) == (5, True)


def test_the_same_from_python(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    path = write_experiment()
    assert here("run", path, "--out", "out")[0] == 0
    result = fedcluster.run(fedcluster.load(path))
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, result.model.state_dict()[name])


def test_the_digits_repeat_and_it_says_so_once(here: Here, write_experiment: Write) -> None:
    _, _, err = here("run", write_experiment(fleet={"devices": 12, "samples": 500}), "--out", "out")
    assert err.count("hold samples more than once") == 1


def broken(**keys: Any) -> dict[str, Any]:
    return keys


@pytest.mark.parametrize(
    ("sections", "code", "said"),
    [
        (broken(clusters={"cuont": 5}), 2, "clusters.cuont is not a key; did you mean count?"),
        (broken(colour="red"), 2, "colour is not a key; allowed: seed, rounds, method"),
        (
            broken(clusters={"count": 0}),
            2,
            "clusters.count = 0 is not allowed: Input should be greater than or equal to 1",
        ),
        (broken(clusters={"count": "many"}), 2, "clusters.count = 'many' is not allowed"),
        (broken(clusters={"method": "moon"}), 2, "clusters.method = 'moon' is not allowed: use one of random"),
        (broken(clusters={"order": "moon"}), 2, "clusters.order = 'moon' is not allowed: Input should be 'cyclic', "),
        (broken(clusters={"method": "file"}), 2, "clusters.path is missing"),
        (broken(clusters={"count": 13}), 2, "clusters.count = 13 is more than the fleet's 12 devices"),
        (
            broken(clusters={"method": "major_class", "count": 2, "rho_cluster": 1.0}),
            2,
            "lower rho_cluster or raise count",
        ),
        (broken(clusters={"method": "nowhere.module:f"}), 2, "nowhere.module:f: cannot be imported"),
        (broken(clusters={"method": "file", "path": "none.csv"}), 3, "clusters.path: cannot read none.csv"),
        (broken(local={"lr": -1.0}), 2, "local.lr = -1.0 is not allowed: Input should be greater than 0"),
        (broken(local={"batch": "half"}), 2, "local.batch = 'half' is not allowed"),
        (broken(local={"mu": float("nan")}), 2, "local.mu = nan is not allowed"),
        (broken(local={"betas": [0.9]}), 2, "local.betas"),
        (broken(fleet={"rho_device": 1.5}), 2, "fleet.rho_device = 1.5 is not allowed"),
        (broken(fleet={"partition": "natural"}), 3, "needs to know which device holds each row of digits"),
        (broken(local=3), 2, "local = 3 is not allowed"),
        (broken(seed=True), 2, "seed = True is not allowed"),
        (broken(model={"name": "transformer"}), 2, "model.name = 'transformer' is not allowed"),
        (
            broken(model={"name": "logistic", "init": "none.safetensors"}),
            3,
            "model.init: there is no file none.safetensors",
        ),
        (broken(data={"name": "none.npz"}), 3, "there is no file none.npz"),
        (broken(data={"name": "./none"}), 3, "there is no file or folder ./none"),
        (broken(local={"lr": 1e30}, model={"name": "mlp"}), 4, "round 1: "),
    ],
)
def test_bad_experiments_end_in_one_sentence(
    sections: dict[str, Any], code: int, said: str, write_experiment: Write, here: Here, tmp_path: Path
) -> None:
    ended, _, err = here("run", write_experiment(**sections), "--out", "out")
    assert (ended, said in err, "Traceback" in err) == (code, True, False), err
    assert (tmp_path / "out").exists() == (code == 4)  # nothing half-written: what could not begin leaves no trace


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "none.toml"], 3, "none.toml: there is no such experiment file"),
        (["run", "experiment.toml", "-o", "rounds"], 2, "write it as key=value"),
        (["run", "experiment.toml", "-o", "rounds.x=1"], 2, "rounds.x"),
        (["run", "experiment.toml", "--resume"], 2, "--resume needs --out"),
        (["run", "experiment.toml", "--out", "experiment.toml/x"], 5, "cannot write to experiment.toml/x"),
        (["compare", "experiment.toml", "--methods", "fedsgd"], 2, "methods are fedavg, fedcluster, centralized"),
        (["compare", "experiment.toml", "--methods", "fedavg,fedavg"], 2, "names a method twice"),
        (["compare", "experiment.toml", "--lr", "best"], 2, "'best' is not one of 'paper', 'equal', 'tuned'"),
        (["compare", "experiment.toml", "--seeds", "0"], 2, "0 is not in the range 1<=x<=1000"),
        (["compare", "experiment.toml", "--x", "miles"], 2, "'miles' is not one of 'rounds'"),
        (["reproduce", "fig7"], 2, "'fig7' is not one of 'fig2'"),
        (["reproduce", "fig2", "--scale", "huge"], 2, "'huge' is not one of 'quick', 'standard', 'paper'"),
        (["serve", "experiment.toml", "--insecure", "--listen", "x:y"], 2, "write it as HOST:PORT"),
        (["compare", "experiment.toml", "--x", "time"], 2, "add a section [clock] to the experiment"),
        (["partition", "none.toml"], 3, "there is no such experiment file"),
        (["plan", "none.csv", "--count", "2"], 3, "fleet.path: cannot read none.csv"),
        (["plan", "experiment.toml", "--count", "2"], 3, "column 'rounds = 3' is not known"),
        (["plan", "experiment.toml", "--count", "2", "--soft"], 2, "--soft needs --availability"),
        (["plan", "experiment.toml", "--count", "2", "--date", "May"], 2, "write a day as YYYY-MM-DD"),
        (["plan", "experiment.toml"], 2, "Missing option '--count'"),
    ],
)
def test_bad_words_end_in_one_sentence(
    words: list[str], code: int, said: str, here: Here, write_experiment: Write
) -> None:
    write_experiment()
    ended, _, err = here(*words)
    assert (ended, said in " ".join(err.replace("│", " ").split())) == (code, True), err


def test_not_toml(here: Here, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    code, _, err = here("run", "bad.toml")
    assert code == 2
    assert "bad.toml: not valid TOML: Invalid value (at line 1, column 10)" in err


def test_no_network_is_said_plainly(cli: Run, write_experiment: Write) -> None:
    path = write_experiment(data={"name": "mnist"})
    done = cli("run", path, "--out", "out", FEDCLUSTER_DATA="", HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    assert "cannot load ylecun/mnist" in done.stderr
    assert "FEDCLUSTER_DATA" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hostile_start_is_refused(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 100)
    save_file({"linear.weight": torch.zeros(10, 3)}, tmp_path / "shape.safetensors")
    poison = {"linear.weight": torch.full((10, 64), float("nan")), "linear.bias": torch.zeros(10)}
    save_file(poison, tmp_path / "nan.safetensors")
    for name, said in (("junk", "not a safetensors file"), ("shape", "must have the tensors"), ("nan", "not finite")):
        model = {"name": "logistic", "init": f"{name}.safetensors"}
        code, _, err = here("run", write_experiment(model=model), "--out", name)
        assert (code, said in err) == (3, True), err


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process train here: processes of a pool take seconds to start."""
    monkeypatch.setattr("fedcluster.training.executors.processes.cores", lambda: 1)


def test_compare_prints_a_table_and_draws(
    cli: Run, here: Here, one_core: None, write_experiment: Write, tmp_path: Path
) -> None:
    done = cli("compare", write_experiment(), "--seeds", "2", "--out", "out")
    assert done.returncode == 0, done.stderr
    for word in ("FedAvg", "FedCluster", "centralized SGD", "train loss", "device updates", "0.3", "±"):
        assert word in done.stdout
    assert (tmp_path / "out" / "curves.png").exists()
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert report["methods"]["fedavg"]["lr"] == pytest.approx(3 * report["methods"]["fedcluster"]["lr"])
    starts = {
        method: json.loads((tmp_path / "out" / f"{method}-seed1" / "run.json").read_text())
        for method in ("fedavg", "fedcluster", "centralized")
    }
    assert len({json.dumps(s["start"]) for s in starts.values()}) == 1  # the same start and the same yardstick
    assert len({s["fingerprints"]["data"] for s in starts.values()}) == 1
    again = ["compare", write_experiment(), "--seeds", "2", "--out", "out"]
    assert here(*again)[0] == 5
    assert here(*again, "--resume")[1] == done.stdout


def test_partition_shows_and_writes_what_can_be_read_back(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **blobs())
    keys = {"data": {"name": "data.npz"}, "fleet": {"partition": "natural"}}
    code, text, _ = here("partition", write_experiment(**keys), "--out", "out", "--html", "page.html")
    assert [table["title"] for table in data_in(tmp_path / "page.html")["tables"]] == ["Devices", "Clusters"]
    assert (code, "7 devices" in text, "q_K" in text) == (0, True, True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"devices.csv", "clusters.csv", "partition.png"}
    path = write_experiment(**keys, clusters={"method": "file", "path": "out/clusters.csv", "participation": 1.0})
    assert "7 devices in 3 clusters" in here("run", path, "--out", "run")[1]


def test_compare_over_simulated_time(here: Here, one_core: None, write_experiment: Write, tmp_path: Path) -> None:
    path = write_experiment(fleet={"devices": 30, "samples": 20, "world": "diurnal"}, clock={})
    code, text, err = here("compare", path, "--seeds", "2", "--x", "time", "--out", "out", "--html", "pages/page.html")
    assert code == 0, err
    page = data_in(tmp_path / "pages" / "page.html")
    methods = ["FedAvg", "FedCluster", "centralized SGD"]
    assert [run["group"] for run in page["runs"]] == [name for name in methods for _ in range(2)]
    assert page["sentences"][-1] in text.replace("\n", " ")
    assert "simulated hours to loss" in text
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    for method in ("fedavg", "fedcluster"):
        spent = report["methods"][method]["time_to_target"]
        seconds = [line["simulated_seconds"] for line in report["methods"][method]["final"]]
        assert all(hours is None or 0 <= hours <= last / 3600 for hours, last in zip(spent, seconds, strict=True))
    for x in ("updates", "bytes", "aggregations"):
        assert here("compare", path, "--seeds", "2", "--x", x, "--out", "out", "--resume")[0] == 0


FLEET = """device,timezone,samples
tokyo,Asia/Tokyo,20
osaka,Asia/Tokyo,30
berlin,Europe/Berlin,40
paris,Europe/Paris,50
lima,America/Lima,60
nowhere,America/Lima,20
"""
TRACE = """device,start,end,timezone
tokyo,79200,108000,Asia/Tokyo
osaka,79200,108000,Asia/Tokyo
berlin,82800,108000,Europe/Berlin
paris,82800,108000,Europe/Paris
lima,79200,108000,America/Lima
"""


@pytest.mark.parametrize("soft", [False, True])
def test_a_plan_is_taken_back_by_a_run(soft: bool, here: Here, write_experiment: Write, tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(FLEET)
    (tmp_path / "trace.csv").write_text(TRACE)
    words = ["plan", "fleet.csv", "--availability", "trace.csv", "--count", "4", "--out", "out", *["--soft"] * soft]
    code, text, err = here(*words)
    assert code == 0, err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"clusters.csv", "plan.png"}
    assert "1 of 6 devices (16.7%) are never available long enough" in text
    rows = (tmp_path / "out" / "clusters.csv").read_text().splitlines()
    assert rows[-1] == ("nowhere,none,none" if soft else "nowhere,none")
    keys = {
        "fleet": {"path": "fleet.csv", "availability": "trace.csv"},
        "clusters": {"method": "file", "path": "out/clusters.csv", "participation": 1.0, "order": "cyclic"},
        "clock": {},
    }
    code, text, err = here("run", write_experiment(**keys), "--out", "run")
    assert code == 0, err
    assert "1 of 6 devices are in no cluster" in err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["device_updates"] > 0
    assert not any(line["dropped"] for line in lines)  # nothing is known of their speed, so it takes no time
    assert lines[-1]["simulated_seconds"] > 2 * 86400 * 0.5


def test_a_plan_by_time_zone(here: Here, tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(FLEET)
    code, text, _ = here("plan", "fleet.csv", "--count", "3", "--out", "out", "--html", "page.html")
    assert (code, "never free" in text) == (0, False)
    page = data_in(tmp_path / "page.html")
    assert page["tables"][0]["rows"][0][:2] == ["0", "2"]
    assert page["pictures"][0]["source"].startswith("data:image/png;base64,")
    assert "+9 to +9" in text
    assert "-5 to -5" in text
    rows = (tmp_path / "out" / "clusters.csv").read_text().splitlines()
    assert rows[1:] == ["tokyo,0", "osaka,0", "berlin,1", "paris,1", "lima,2", "nowhere,2"]


def test_default_folders_are_new_each_time(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    for _ in range(2):
        assert here("run", write_experiment())[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["experiment", "experiment-2"]


SLOW_IMPORTS = ("torch", "datasets", "sklearn", "scipy", "matplotlib", "numpy")
CHEAP = """
import sys
from fedcluster.cli.main import app

for words in {commands}:
    try:
        app(words)
    except SystemExit as ended:
        print('ended', ended.code)
print('loaded', [name for name in {slow} if name in sys.modules])
"""


def test_what_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    """Help, and mistakes that can be seen without it."""
    (tmp_path / "e.toml").write_text("[local]\nlr = -1.0\n")
    (tmp_path / "f.toml").write_text("[flet]\ndevices = 3\n")
    commands = [
        ["--help"],
        ["compare", "--lr", "best"],
        ["compare", "--methods", "fedsgd"],
        ["run", "none.toml"],
        ["run", "e.toml"],
        ["run", "f.toml"],
        ["serve", "e.toml"],
        ["reproduce", "fig9"],
    ]
    code = CHEAP.format(commands=commands, slow=SLOW_IMPORTS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    ended = [line for line in done.stdout.splitlines() if line.startswith(("ended", "loaded"))]
    assert ended == ["ended 0", *["ended 2"] * 2, "ended 3", *["ended 2"] * 4, "loaded []"], done.stderr
    for said in ("local.lr = -1.0 is not allowed", "flet is not a key; did you mean fleet?", "reading e.toml"):
        assert said in done.stderr


def test_interrupt_leaves_what_can_be_resumed(write_experiment: Write, tmp_path: Path) -> None:
    path = write_experiment(rounds=100_000)
    with subprocess.Popen(
        [sys.executable, "-m", "fedcluster", "run", str(path), "--out", "out"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background job ignores interrupts, and so would we: that is right, but not what is tested
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        rounds = tmp_path / "out" / "metrics.jsonl"
        until(lambda: (rounds.exists() and rounds.stat().st_size > 0) or process.poll() is not None)
        process.send_signal(2)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "progress is saved, continue with --resume" in said
    assert "Traceback" not in said


def test_evaluate_scores_a_run_again(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    keys = {"fleet": {"devices": 12, "samples": 20, "test_share": 0.2}, "eval": {"every": 1, "best": "test_loss"}}
    assert here("run", write_experiment(**keys), "--out", "out")[0] == 0
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    code, text, err = here("evaluate", "out", "--devices", "--out", "scores")
    assert code == 0, err
    for said in ("359 test samples of digits, model of round 3", f"{last['test_loss']:.4f}", "worst decile", "cluster"):
        assert said in text
    assert f"{last['by_device']['accuracy']['mean']:.2%}" in text
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {"devices.parquet", "devices.png"}
    assert "model of round" in here("evaluate", "out", "--best")[1]
    assert here("evaluate", "out", "--data", "digits")[1] == here("evaluate", "out")[1]


def test_evaluate_prepares_another_table_as_the_run_prepared_its_own(
    here: Here, write_experiment: Write, tmp_path: Path
) -> None:
    """Other rows have another mean, fewer kinds and one class less: they are read with the statistics of the run."""
    rng = np.random.default_rng(0)
    size, kind = rng.normal(5000, 300, 300), rng.choice(["a", "b", "c"], 300)
    price = 2 * size + 500 * (kind == "b") + rng.normal(0, 10, 300)
    grade = np.array(["low", "middle", "high"])[np.digitize(size, [4800, 5200])]
    rows = [f"{a:.2f},{k},{p:.2f},{g}" for a, k, p, g in zip(size, kind, price, grade, strict=True)]
    chosen = [row for row in rows if ",c," not in row and "middle" not in row and float(row.split(",")[0]) > 4700]
    for name, lines in (("all", rows), ("some", chosen)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["size,kind,price,grade", *lines]))
    for target, task in (("price", "regression"), ("grade", "classification")):
        data = {"name": "all.csv", "features": ["size", "kind"], "target": target}
        keys: dict[str, Any] = {"data": data, "task": {"name": task}, "model": {"name": "logistic"}, "rounds": 15}
        keys |= {"fleet": {"devices": 4, "partition": "iid"}, "clusters": {"count": 1, "participation": 1.0}}
        path = write_experiment(**keys, local={"lr": 0.1, "steps": 20})
        code, _, err = here("run", path, "--out", target)
        assert code == 0, err
        code, text, err = here("evaluate", target, "--data", "some.csv")
        assert code == 0, err
        assert f"{len(chosen)} test samples of some.csv" in text
        score = float(text.split("rmse" if target == "price" else "accuracy")[1].split()[0].rstrip("%"))
        assert score < 20 if target == "price" else score > 90


def test_evaluate_says_what_it_cannot_do(here: Here, write_experiment: Write, tmp_path: Path) -> None:
    assert here("run", write_experiment(), "--out", "out")[0] == 0
    np.savez(tmp_path / "data.npz", **blobs())
    for words, code, said in (
        (["none"], 5, "there is no folder none"),
        (["."], 5, ". does not hold a finished run: finish it with --resume"),
        (["out", "--devices"], 2, "the run's fleet.test_share is 0"),
        (["out", "--best"], 5, "did not keep its best model"),
        (["out", "--data", "data.npz"], 3, "has samples [5] of 3 classes"),
        (["out", "--data", "digits", "--devices"], 2, "leave out --data"),
    ):
        ended, _, err = here("evaluate", *words)
        assert (ended, said in " ".join(err.replace("│", " ").split())) == (code, True), err
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    assert "metrics.jsonl is missing or altered" in here("evaluate", "out")[2]
    (tmp_path / "out" / "run.json").unlink()
    (tmp_path / "out" / "diverged.txt").write_text("round 2: the loss is not finite\n")
    assert "out has no model: training diverged (diverged.txt says where)" in here("evaluate", "out")[2]


def test_evaluate_on_a_table_that_is_not_like_that_of_the_run(
    here: Here, write_experiment: Write, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "pay": [f"{pay:.2f}" for pay in rng.normal(100, 20, 200)],
        "user": [str(user) for user in rng.integers(0, 5, 200)],
        "buys": list(rng.choice(["no", "yes"], 200)),
    }

    def write(name: str, **changed: list[str] | None) -> None:
        kept = {key: column for key, column in (columns | changed).items() if column is not None}
        lines = [kept.keys(), *zip(*kept.values(), strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(map(",".join, lines)))

    write("all")
    write("nobody", user=None)
    write("rich", pay=["rich"] * 200)
    write("maybe", buys=["no", "maybe"] * 100)
    data = {"name": "all.csv", "features": ["pay"], "target": "buys", "device": "user"}
    keys = {"data": data, "fleet": {"partition": "natural"}, "clusters": {"count": 2, "participation": 1.0}}
    assert here("run", write_experiment(**keys, model={"name": "logistic"}), "--out", "out")[0] == 0
    code, text, err = here("evaluate", "out", "--data", "nobody.csv")  # whose a row is does not matter
    assert (code, "200 test samples of nobody.csv" in text) == (0, True), err
    for name, said in (
        ("rich.csv", "pay 'rich' is not a number: data.standardise has its mean and deviation"),
        ("maybe.csv", "buys 'maybe' is not among the classes that data.categories lists: no, yes"),
        ("digits", "digits gives arrays, but the columns of a table are needed"),
    ):
        code, _, err = here("evaluate", "out", "--data", name)
        assert (code, said in err) == (3, True), err
