"""Attacks: what malicious devices send and train on, in every executor, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.attacks.attack import Attack, Uploads
from fedcluster.attacks.attacker import Attacker, malicious_devices
from fedcluster.attacks.registry import ATTACKS
from fedcluster.data.dataset import DataSpec
from fedcluster.experiment import Attack as Section
from fedcluster.experiment import Section as Keys
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.rng import stream
from fedcluster.runs.progress import Display

SPEC = DataSpec((1, 8, 8), "class", 10)
KEYS: dict[str, Any] = {
    "rounds": 2,
    "fleet": {"devices": 20, "samples": 20, "rho_device": 0.5},
    "clusters": {"count": 2, "participation": 0.6},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
}
RECEIVED = {"model": torch.tensor([1.0, 2.0])}


def attack(name: str, share: float = 0.2, **options: Any) -> Attack:
    section = Section(name=name, share=share, **options)
    built: Attack = section.find()(section.options, SPEC, share)
    return built


def forged(name: str, uploads: Uploads, malicious: list[int], **options: Any) -> Uploads:
    return attack(name, **options).forge(uploads, malicious, RECEIVED, partial(stream, 0, "attack", 0, 0))


def uploads() -> Uploads:
    """Movements (1, 0), (0, 2), (2, 1) and (1, 1), and another part of the message."""
    moves = {3: (1.0, 0.0), 5: (0.0, 2.0), 7: (2.0, 1.0), 8: (1.0, 1.0)}
    return {k: {"model": RECEIVED["model"] + torch.tensor(v), "variate": torch.tensor([0.5])} for k, v in moves.items()}


def test_signs_are_flipped_and_movements_scaled() -> None:
    found = forged("sign_flip", uploads(), [5], scale=3.0)
    assert found.keys() == {5}
    assert found[5]["model"].tolist() == [1.0, 2.0 - 6.0]
    assert found[5]["variate"].tolist() == [-1.5]
    assert forged("replacement", uploads(), [7], share=0.25)[7]["model"].tolist() == [1.0 + 8.0, 2.0 + 4.0]
    assert forged("replacement", uploads(), [7], boost=2.0)[7]["model"].tolist() == [5.0, 4.0]


def test_noise_is_as_long_as_it_should_be_and_differs_by_device() -> None:
    received = {"model": torch.ones(10_000)}
    sent = {k: {"model": torch.full((10_000,), 1.5)} for k in (1, 2)}
    found = attack("gaussian", scale=2.0).forge(sent, [1, 2], received, partial(stream, 0, "attack", 0, 0))
    moved = found[1]["model"] - 1
    assert float(moved.norm()) == pytest.approx(2 * 0.5 * 100, rel=0.05)
    assert not torch.equal(found[1]["model"], found[2]["model"])


def test_colluders_send_the_same_made_from_what_honest_devices_send() -> None:
    honest = np.array([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0]])
    wanted = honest.mean(0) - 1.2 * honest.std(0, ddof=1)
    found = forged("little_is_enough", uploads(), [8], z=1.2)[8]["model"] - RECEIVED["model"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    wanted = honest.mean(0) - 5 * honest.std(0, ddof=1)
    found = forged("little_is_enough", uploads(), [8], z=5.0)[8]["model"] - RECEIVED["model"]
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted) * np.sqrt(5), rtol=1e-5)  # as long as (2, 1)
    alone = {k: message for k, message in uploads().items() if k in (3, 8)}
    assert forged("little_is_enough", alone, [8])[8] is alone[8]  # one honest update has no deviation
    two = forged("inner_product", uploads(), [3, 8], scale=2.0)
    assert two[3] is two[8]
    np.testing.assert_allclose(two[3]["model"], [1 - 2 * 1.0, 2 - 2 * 1.5])
    assert forged("inner_product", {8: uploads()[8]}, [8])[8]["model"].tolist() == [0.0, 1.0]


def test_labels_are_flipped() -> None:
    x, y = torch.zeros(3, 1, 8, 8), torch.tensor([0, 3, 9])
    assert attack("label_flip").poison(x, y, stream(0, "x"))[1].tolist() == [9, 6, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_trigger_is_a_bright_square_with_another_class(dtype: torch.dtype) -> None:
    x, y = torch.arange(640).reshape(10, 1, 8, 8).remainder(16).to(dtype), torch.arange(10)
    backdoor = attack("backdoor", target=4, patch=2, poisoned=0.3)
    poisoned, targets = backdoor.poison(x, y, stream(0, "x"))
    changed = [row for row in range(10) if not torch.equal(poisoned[row], x[row])]
    bright = 255 if dtype == torch.uint8 else 15
    assert len(changed) == 3
    for row in changed:
        assert (poisoned[row, 0, -2:, -2:] == bright).all()
        assert torch.equal(poisoned[row, 0, :6], x[row, 0, :6])
        assert targets[row] == 4
    assert torch.equal(targets, torch.where(torch.isin(torch.arange(10), torch.tensor(changed)), 4, y))
    triggered = backdoor.triggered(x, y)
    assert triggered is not None
    assert len(triggered[0]) == 9  # those of class 4 would be right
    assert (triggered[1] == 4).all()
    assert (triggered[0][:, 0, -2:, -2:] == bright).all()
    assert torch.equal(x, torch.arange(640).reshape(10, 1, 8, 8).remainder(16).to(dtype))  # nobody else's change


@pytest.mark.parametrize(("share", "counts"), [(0.2, [2] * 10), (0.25, [2, 3]), (0.01, [0, 1])])
def test_malicious_devices_are_spread_evenly(share: float, counts: list[int]) -> None:
    clusters = Clusters(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 10)), 10)
    devices = malicious_devices(Section(share=share), clusters, seed=3)
    assert len(devices) == round(100 * share)
    assert {len(devices & set(members.tolist())) for members in clusters.members} == set(counts)
    assert devices != malicious_devices(Section(share=share), clusters, seed=4)


def test_malicious_devices_fill_one_cluster_after_the_other() -> None:
    clusters = Clusters(np.append(np.arange(40) % 4, -1), 4)
    devices = malicious_devices(Section(share=0.4, placement="concentrated"), clusters, seed=0)
    assert sorted(len(devices & set(members.tolist())) for members in clusters.members) == [0, 0, 6, 10]
    assert 40 not in devices  # which is in no cluster


def test_only_malicious_devices_have_other_samples() -> None:
    data = fedcluster.Dataset(np.zeros((6, 1, 8, 8), np.uint8), np.arange(6), np.zeros((2, 1, 8, 8), np.uint8), [0, 1])
    attacker = Attacker(attack("label_flip"), frozenset([1]), seed=0)
    rows = np.array([4, 5])
    assert attacker.samples(0, data, rows) == (data, rows)
    own, places = attacker.samples(1, data, rows)
    assert own.y_train[torch.from_numpy(places)].tolist() == [5, 4]
    assert data.y_train.tolist() == [0, 1, 2, 3, 4, 5]


def trained(folder: Path | None = None, options: dict[str, Any] | None = None, **keys: Any) -> fedcluster.Result:
    return fedcluster.run(fedcluster.Experiment(**KEYS | keys), folder, display=Display(), **options or {})


def weights(result: fedcluster.Result) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in result.model.parameters())


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_changes_the_model_and_workers_change_nothing(name: str) -> None:
    section = {"name": name, "share": 0.3}
    alone = trained(attack=section)
    assert weights(alone) != weights(trained())
    assert weights(alone) == weights(trained(attack=section, options={"workers": 2}))
    stacked = trained(attack=section, options={"cohorts": "stacked"})
    assert stacked.history[-1]["train_loss"] == pytest.approx(alone.history[-1]["train_loss"], rel=1e-3)
    assert ("backdoor_success" in alone.history[-1]) == (name in ("backdoor", "replacement"))


def test_a_backdoor_works_and_malicious_devices_are_on_record(tmp_path: Path) -> None:
    """With half of the devices, on the mean; the model stays as good on other pictures."""
    local = {"steps": 20, "batch": 20, "lr": 0.3}
    keys: dict[str, Any] = {"rounds": 4, "local": local, "fleet": {"devices": 20, "samples": 60, "rho_device": 0.1}}
    result = trained(tmp_path / "run", attack={"name": "backdoor", "share": 0.5}, **keys)
    last = result.history[-1]
    assert last["backdoor_success"] > 0.6
    assert last["test_accuracy"] > 0.75
    lines = [json.loads(line) for line in (tmp_path / "run/cycles.jsonl").read_text().splitlines()]
    named = [device for line in lines for device in line.get("malicious", [])]
    assert len(set(named)) == 10
    assert all(set(line.get("malicious", [])) <= set(line["cohort"]) for line in lines)
    trained(tmp_path / "parts", attack={"name": "backdoor", "share": 0.5}, **keys | {"rounds": 2})
    again = fedcluster.run(
        fedcluster.Experiment(**KEYS | keys, attack={"name": "backdoor", "share": 0.5}),
        tmp_path / "parts",
        resume=True,
        display=Display(),
    )
    assert weights(again) == weights(result)


class Silent(Attack):
    """Sends what it received: an attack of one's own, with an option."""

    class Options(Keys):
        times: float = 0.0

    def forge(self, uploads: Uploads, malicious: list[int], received: Any, rng: Any) -> Uploads:
        return {k: {"model": received["model"] * (1 + self.options.times)} for k in malicious}


def test_an_attack_of_ones_own_has_options() -> None:
    still = trained(attack={"name": f"{__name__}:Silent", "share": 0.5})
    assert weights(still) == weights(trained(attack={"name": Silent, "share": 0.5}))
    assert weights(still) != weights(trained(attack={"name": Silent, "share": 0.5, "times": 0.1}))


def fleet_of_rows(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return str(tmp_path / "rows.npz")


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ({"name": "backdoor"}, {"data": "rows"}, "a backdoor's trigger is for pictures"),
        ({"name": "backdoor", "target": 10}, {}, "target = 10 and patch = 3 do not fit 10 classes"),
        ({"name": "backdoor", "patch": 9}, {}, "pictures of 8 x 8 pixels"),
        ({"share": 1.0}, {}, "attack.share = 1.0 is not allowed"),
        ({"share": 0.0}, {}, "attack.share = 0.0 is not allowed"),
        ({"share": 0.01}, {}, "attack.share = 0.01 is less than one device"),
        ({"placement": "concentrated"}, {"clusters": {"method": "redrawn", "count": 2}}, "draws new ones"),
        ({"name": "sign_flip"}, {"method": "centralized"}, r"\[attack\] needs devices"),
        ({"name": "builtins:dict"}, {}, "does not derive from fedcluster.attacks"),
        ({"name": "sign"}, {}, "attack.name = 'sign' is not allowed: use one of sign_flip"),
        ({"name": "sign_flip", "boost": 2.0}, {}, 'boost is an option of name = "replacement"'),
    ],
)
def test_what_cannot_be_attacked_is_refused(
    section: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if keys.get("data") == "rows":
        keys = {"data": {"name": fleet_of_rows(tmp_path)}, "fleet": {"devices": 5, "samples": 10, "partition": "iid"}}
    with pytest.raises(fedcluster.FedClusterError, match=message):
        trained(attack=section, **keys)


def test_a_federation_simulates_nobody() -> None:
    server = pytest.importorskip("fedcluster.flower.server")
    with pytest.raises(fedcluster.FedClusterError, match=r"\[attack\] simulates malicious devices"):
        server.check(fedcluster.Experiment(attack={"name": "sign_flip"}), with_keys=True)
