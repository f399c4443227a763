"""The experiment file is a contract: its keys, its defaults, and that it survives a round trip."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.errors import BadExperiment
from fedcluster.experiment import Local, changes, options_class
from fedcluster.experiment.parts import registered
from tests.conftest import Here

DEFAULTS = """
seed = 0
rounds = 100
method = "fedcluster"
transforms = []
[data]
name = "digits"
[fleet]
devices = 1000
samples = 500
partition = "major_class"
rho_device = 0.5
date = "2026-01-01"
test_share = 0.0
[clusters]
method = "random"
count = 10
order = "reshuffle"
weighting = "cluster"
overlap = 0
participation = 0.1
[algorithm]
name = "fedavg"
[local]
optimizer = "sgd"
steps = 20
batch = 30
lr = 0.01
momentum = 0.5
nesterov = false
betas = [0.9, 0.999]
eps = 1e-8
[aggregation]
name = "mean"
[server]
optimizer = "none"
lr = 1.0
betas = [0.9, 0.99]
tau = 1e-3
[accept]
norm_bound = 10.0
[centralized]
batch = 60
[eval]
every = 10
devices = "all"
"""


def test_defaults_are_the_papers() -> None:
    assert fedcluster.Experiment().to_dict() == tomllib.loads(DEFAULTS)


def test_toml_round_trip(tmp_path: Path) -> None:
    experiment = fedcluster.Experiment(
        seed=3, clusters={"method": "file", "path": "/x.csv"}, fleet={"partition": "natural"}, local={"batch": "full"}
    )
    (tmp_path / "e.toml").write_text(experiment.to_toml())
    again = fedcluster.load(tmp_path / "e.toml")
    assert again == experiment
    assert again.digest() == experiment.digest() != fedcluster.Experiment().digest()
    assert again.clusters.count is None


def test_changes_name_the_keys() -> None:
    old = fedcluster.Experiment()
    new = old.override(**{"clusters.count": 5, "seed": 2})
    assert changes(old.to_dict(), new.to_dict()) == ["clusters.count (was 10, now 5)", "seed (was 0, now 2)"]


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        fedcluster.Experiment().seed = 5


def test_paths_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "data.npz").touch()
    (tmp_path / "fleet.csv").touch()
    keys = '[data]\nname = "data.npz"\n[fleet]\npath = "fleet.csv"\navailability = "none.csv"\n'
    (tmp_path / "e.toml").write_text(keys + '[model]\ninit = "none.safetensors"\n')
    experiment = fedcluster.load(tmp_path / "e.toml")
    assert experiment.data.name == str(tmp_path / "data.npz")
    assert experiment.model.init == "none.safetensors"
    assert (experiment.fleet.path, experiment.fleet.availability) == (str(tmp_path / "fleet.csv"), "none.csv")
    assert experiment.fleet.devices is None


def test_overrides_take_toml_values_and_plain_words(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("")
    words = ["local.betas=[0.8, 0.9]", "local.batch=full", 'model.name="mlp"', "seed=7", "clusters.participation=1.0"]
    experiment = fedcluster.load(tmp_path / "e.toml", words)
    assert experiment.local.betas == (0.8, 0.9)
    assert (experiment.local.batch, experiment.model.name, experiment.seed) == ("full", "mlp", 7)


def test_every_problem_is_counted() -> None:
    with pytest.raises(BadExperiment, match=r"clusters.count = 0 is not allowed: .* \(and 1 more\)"):
        fedcluster.Experiment(clusters={"count": 0}, local={"lr": 0.0})


def test_public_names() -> None:
    assert fedcluster.__all__ == sorted(fedcluster.HOME)
    assert all(getattr(fedcluster, name).__module__.startswith("fedcluster.") for name in fedcluster.__all__)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["run", "compare", "partition", "plan", "--version"]),
        (["run"], ["-o", "--out", "--resume"]),
        (["compare"], ["-o", "--methods", "--seeds", "--lr", "--target", "--x", "--out", "--resume"]),
        (["partition"], ["-o", "--out"]),
        (["plan"], ["FLEET", "--availability", "--count", "--soft", "--out"]),
    ],
)
def test_the_command_line_stays(command: list[str], words: list[str], here: Here) -> None:
    code, text, _ = here(*command, "--help")
    assert code == 0
    assert all(word in text for word in words)


def test_with_keeps_the_other_keys_of_a_section() -> None:
    base = fedcluster.Experiment(local={"lr": 0.5, "steps": 7, "algorithm": "fedprox"})
    changed = base.override(local={"lr": 0.2}, rounds=3)
    assert (changed.local.lr, changed.local.steps, changed.algorithm.name) == (0.2, 7, "fedprox")
    assert changed == base.override(**{"local.lr": 0.2, "rounds": 3})
    assert base.override(local=Local(lr=0.2)).local == Local(lr=0.2)
    assert base.override(clock={"dropout": 0.1}).override(clock=None).clock is None
    with pytest.raises(BadExperiment, match=r"local\.rate is not a key"):
        base.override(local={"rate": 0.2})


def test_options_of_algorithms_stood_in_local_and_are_written_back_where_they_stand_now(tmp_path: Path) -> None:
    old = """
[local]
algorithm = "fedprox"
mu = 0.5
beta = 1.0
option = "II"
"""
    (tmp_path / "old.toml").write_text(old)
    found = fedcluster.load(tmp_path / "old.toml")
    assert found.to_dict()["algorithm"] == {"name": "fedprox", "mu": 0.5}
    assert found == fedcluster.Experiment(algorithm={"name": "fedprox", "mu": 0.5})
    assert fedcluster.load(tmp_path / "old.toml", ["local.mu=0.7"]).to_dict()["algorithm"]["mu"] == 0.7
    assert fedcluster.load(tmp_path / "old.toml", ["local.algorithm=scaffold"]).to_dict()["algorithm"] == {
        "name": "scaffold",
        "option": "II",
        "reset": "never",
    }


def test_options_of_clusterings_were_keys_of_every_clustering(tmp_path: Path) -> None:
    former = 'rho_cluster = 0.1\nfeatures = "labels"\nfree_seconds = 600.0\nsoft = false\n'
    for method in ("random", "major_class", "balanced", "availability"):
        (tmp_path / "old.toml").write_text(f'[clusters]\nmethod = "{method}"\n{former}')
        assert fedcluster.load(tmp_path / "old.toml") == fedcluster.Experiment(clusters={"method": method})
    (tmp_path / "old.toml").write_text('[clusters]\nmethod = "random"\nrho_cluster = 0.3\n')
    with pytest.raises(BadExperiment, match=r'clusters\.rho_cluster is an option of method = "major_class": remove it'):
        fedcluster.load(tmp_path / "old.toml")
    words = ["clusters.rho_cluster=0.4", "clusters.method=major_class"]  # in any order
    (tmp_path / "new.toml").write_text('[clusters]\nmethod = "balanced"\nfeatures = "gradients"\n')
    assert fedcluster.load(tmp_path / "new.toml", words).clusters.options.rho_cluster == 0.4


@pytest.mark.parametrize("docs", ["fedcluster.fleet.clustering.registry:CLUSTERINGS", "fedcluster.models.zoo:ZOO"])
def test_the_reference_names_every_part(docs: str) -> None:
    reference = Path("docs/experiment.md").read_text()
    for name, part in registered(docs).items():
        assert f"`{name}`" in reference
        assert all(f"`{option}`" in reference for option in options_class(part).model_fields)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"local": {"mu": 0.7}}, "local.mu = 0.7 is not allowed: the algorithm 'fedavg' has no such option"),
        ({"algorithm": {"name": "fedprox", "nu": 1.0}}, "algorithm.nu is not a key; allowed: mu"),
        ({"algorithm": {"name": "fedavg", "mu": 1.0}}, 'algorithm.mu is an option of name = "fedprox": remove it'),
        ({"algorithm": {"name": "a"}, "local": {"algorithm": "fedavg"}}, "'fedavg' and algorithm.name = 'a' differ"),
        ({"algorithm": 3, "local": {"algorithm": "fedavg"}}, "algorithm = 3 is not allowed"),
        ({"aggregation": {"name": "man"}}, "aggregation.name = 'man' is not allowed: use one of mean"),
        ({"aggregation": {"name": "mean", "share": 0.1}}, "aggregation.share is not a key"),
        ({"transforms": ["noise"]}, "transforms = 'noise' is not allowed: use package.module:name"),
    ],
)
def test_parts_and_their_options_are_checked(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(fedcluster.FedClusterError, match=re.escape(said)):
        fedcluster.Experiment(**keys)
