"""Robust aggregation rules beside independent computations, as parts of runs, and where they are refused."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from numpy.typing import NDArray

import fedcluster
from fedcluster.algorithms.aggregation.mean import Mean
from fedcluster.algorithms.aggregation.registry import AGGREGATORS
from fedcluster.algorithms.aggregation.robust import Cohort, TooFewUpdates
from fedcluster.experiment import Aggregation
from fedcluster.rng import stream
from fedcluster.runs.progress import Display
from fedcluster.state import Aggregate
from fedcluster.training.executors.in_process import InProcess

RULES = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_clip")
KEYS: dict[str, Any] = {
    "rounds": 3,
    "fleet": {"devices": 20, "samples": 20, "rho_device": 0.9},
    "clusters": {"count": 2, "participation": 0.6},
    "model": {"name": "logistic"},
    "local": {"steps": 3, "batch": 5, "lr": 0.1},
}


def cohort_of(c: int, sizes: tuple[int, ...] = (40_000, 7), seed: int = 0) -> dict[int, dict[str, torch.Tensor]]:
    """Messages of c devices, of a model and something else; some values are the same for all devices."""
    rng = np.random.default_rng(seed)
    rows = {}
    for device in rng.permutation(100)[:c].tolist():
        parts = [rng.standard_normal(size).astype(np.float32) for size in sizes]
        parts[0][:100] = -0.0
        rows[device] = dict(zip(("model", "variate"), map(torch.from_numpy, parts), strict=False))
    return rows


def aggregate(
    name: str,
    messages: dict[int, dict[str, torch.Tensor]],
    weights: list[float] | None = None,
    norms: dict[str, tuple[float, ...]] | None = None,
    order: list[int] | None = None,
    absent: tuple[int, ...] = (),
    **options: Any,
) -> Aggregate:
    """What a rule makes of these messages, which come in `order`. `absent` are devices that send nothing."""
    section, spec = Aggregation(name=name, **options), next(iter(messages.values()))
    aggregator = section.find()(spec, section.options, stream(0, "aggregation"))
    shares = dict(zip(messages, weights or [1 / len(messages)] * len(messages), strict=True))
    if hasattr(aggregator, "start"):
        aggregator.start(Cohort(sorted({*messages, *absent}), torch.zeros_like(spec["model"]), norms or {}))
    for device in order or list(messages):
        aggregator.accumulate(messages[device], shares[device], device)
    found: Aggregate | None = aggregator.finish()
    assert found is not None
    return found


def flat(messages: dict[int, dict[str, torch.Tensor]]) -> NDArray[Any]:
    return np.stack([torch.cat(list(messages[device].values())).numpy() for device in sorted(messages)])


def vector(found: Aggregate) -> NDArray[Any]:
    return torch.cat(list(found.message.values())).numpy()


@pytest.mark.parametrize("c", [3, 8])
def test_the_median_is_numpys(c: int) -> None:
    messages = cohort_of(c)
    assert np.array_equal(vector(aggregate("median", messages)), np.median(flat(messages), axis=0))


@pytest.mark.parametrize(("c", "beta"), [(5, 0.2), (10, 0.1), (11, 0.3), (10, 0.49)])
def test_the_trimmed_mean_is_scipys(c: int, beta: float) -> None:
    messages = cohort_of(c)
    expected = scipy.stats.trim_mean(flat(messages).astype(np.float64), beta, axis=0)
    np.testing.assert_allclose(vector(aggregate("trimmed_mean", messages, beta=beta)), expected, rtol=1e-6, atol=1e-7)


def test_the_trimmed_mean_keeps_the_weights_of_what_it_keeps() -> None:
    messages = {k: {"model": torch.tensor([float(k)])} for k in range(5)}
    found = aggregate("trimmed_mean", messages, [0.1, 0.1, 0.2, 0.5, 0.1], beta=0.2)
    assert float(found.message["model"]) == pytest.approx((0.1 * 1 + 0.2 * 2 + 0.5 * 3) / 0.8)
    assert found.discarded == ((0, "cut in 100% of the coordinates"), (4, "cut in 100% of the coordinates"))
    assert found.weight == pytest.approx(1.0)


def brute_force_krum(rows: NDArray[Any], f: int) -> list[int]:
    """Rows by the least sum of squared distances to any c - f - 2 others."""
    rows = rows.astype(np.float64)
    scores = []
    for k in range(len(rows)):
        others = [i for i in range(len(rows)) if i != k]
        sums = [
            sum(float(((rows[k] - rows[i]) ** 2).sum()) for i in near)
            for near in combinations(others, len(rows) - f - 2)
        ]
        scores.append(min(sums))
    return sorted(range(len(rows)), key=scores.__getitem__)


@pytest.mark.parametrize(("c", "f"), [(5, 1), (7, 2), (8, 1)])
def test_krum_selects_what_a_search_over_all_subsets_does(c: int, f: int) -> None:
    messages = cohort_of(c, (300, 7))
    rows, order = flat(messages), brute_force_krum(flat(messages), f)
    assert np.array_equal(vector(aggregate("krum", messages, f=f)), rows[order[0]])
    several = aggregate("multi_krum", messages, f=f, m=c - f - 1)
    chosen = rows[order[: c - f - 1]].astype(np.float64)
    np.testing.assert_allclose(vector(several), chosen.mean(0), rtol=1e-6, atol=1e-7)
    devices = sorted(messages)
    assert [device for device, _ in several.discarded] == sorted(devices[row] for row in order[c - f - 1 :])


def test_krum_takes_no_part_in_a_conspiracy() -> None:
    messages = cohort_of(7, (300, 7))
    bad = sorted(messages)[2:4]
    for device in bad:
        messages[device] = {name: torch.full_like(part, 9.0) for name, part in messages[device].items()}
    assert {*bad} <= {device for device, _ in aggregate("multi_krum", messages, f=2).discarded}


@pytest.mark.parametrize("weights", [None, [0.1, 0.3, 0.2, 0.05, 0.15, 0.2]])
def test_the_geometric_median_is_where_scipy_finds_it(weights: list[float] | None) -> None:
    messages = cohort_of(6, (12, 3))
    messages[sorted(messages)[1]]["model"] += 50
    rows, shares = flat(messages).astype(np.float64), np.array(weights or [1 / 6] * 6)
    by_device = dict(zip(messages, shares, strict=True))
    shares = np.array([by_device[device] for device in sorted(messages)])
    found = aggregate("geometric_median", messages, weights)
    best = scipy.optimize.minimize(
        lambda v: float(shares @ np.linalg.norm(rows - v, axis=1)), rows.mean(0), options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(vector(found), best.x, atol=1e-4)
    assert found.discarded[0][0] == sorted(messages)[1]


def test_clipping_shortens_movements_part_by_part() -> None:
    messages = {
        1: {"model": torch.tensor([3.0, 4.0]), "variate": torch.tensor([0.1])},
        2: {"model": torch.tensor([0.3, 0.4]), "variate": torch.tensor([8.0])},
        3: {"model": torch.tensor([0.0, 1.0]), "variate": torch.tensor([0.2])},
    }
    norms = {"model": (1.0, 1.0, 7.0), "variate": (0.5,)}
    found = aggregate("norm_clip", messages, norms=norms, times=2.0)
    expected = [[1.2, 1.6, 0.1], [0.3, 0.4, 1.0], [0.0, 1.0, 0.2]]
    np.testing.assert_allclose(vector(found), np.mean(expected, axis=0), rtol=1e-6)
    assert found.discarded == ((1, "model: clipped from 5 to 2"), (2, "variate: clipped from 8 to 1"))
    alone = {k: {"model": message["model"]} for k, message in messages.items()}
    assert aggregate("norm_clip", alone, norm=0.5).discarded[0] == (1, "model: clipped from 5 to 0.5")
    first = aggregate("norm_clip", alone)  # nothing is known before the first cycle but the cohort
    assert first.discarded == ((1, "model: clipped from 5 to 1"),)


@pytest.mark.parametrize("weights", [None, [0.3, 0.2, 0.1, 0.25, 0.15]])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("trimmed_mean", {"beta": 0.0}),
        ("trimmed_mean", {"beta": 0.1}),  # b = floor(0.1 x 5) = 0; a run would refuse it
        ("norm_clip", {"times": 1e30}),
        ("norm_clip", {"times": 1e30, "bucketing": 1}),
        ("multi_krum", {"f": 0}),
    ],
)
def test_rules_that_cut_nothing_are_the_mean_to_the_bit(
    name: str, options: dict[str, Any], weights: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AGGREGATORS[name], "least", classmethod(lambda cls, options: 1))
    messages = cohort_of(5)
    found, mean = aggregate(name, messages, weights, **options), aggregate("mean", messages, weights)
    assert vector(found).tobytes() == vector(mean).tobytes()
    assert not found.discarded


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bucketing", [1, 2])
def test_neither_the_order_of_updates_nor_absent_devices_matter(name: str, bucketing: int) -> None:
    messages = cohort_of(11, (500, 7))
    found = aggregate(name, messages, bucketing=bucketing)
    again = aggregate(name, messages, order=sorted(messages), bucketing=bucketing)
    assert vector(found).tobytes() == vector(again).tobytes()
    assert found.discarded == again.discarded
    if bucketing == 1:
        fewer = aggregate(name, messages, absent=(101, 102), bucketing=bucketing)
        assert vector(found).tobytes() == vector(fewer).tobytes()


def test_buckets_are_means_of_updates_drawn_at_random() -> None:
    messages = {k: {"model": torch.tensor([float(2**k)])} for k in range(6)}
    found = float(aggregate("median", messages, bucketing=2).message["model"])
    order = stream(0, "aggregation").permutation(6).tolist()
    assert found == np.median([(2.0**a + 2.0**b) / 2 for a, b in zip(order[::2], order[1::2], strict=True)])
    named = aggregate("krum", cohort_of(9, (50,)), bucketing=2, f=1).discarded
    assert len(named) in (7, 8)  # the devices of all buckets but one


class OneRankOf:
    """An aggregator with the updates of one of two ranks, whose sums `exchange` adds up."""

    def __init__(self, name: str, messages: dict[int, dict[str, torch.Tensor]], rank: int) -> None:
        section, spec = Aggregation(name=name), next(iter(messages.values()))
        self.aggregator = section.find()(spec, section.options, stream(0, "aggregation"))
        self.aggregator.start(Cohort(sorted(messages), torch.zeros_like(spec["model"]), {}))
        for number, device in enumerate(sorted(messages)):
            if number % 2 == rank:
                self.aggregator.accumulate(messages[device], 1 / len(messages), device)


@pytest.mark.parametrize("name", RULES)
def test_two_ranks_have_what_one_has(name: str) -> None:
    """Every tensor that a rank sums is replaced by the sum of both; the other rank's are noted first."""
    messages = cohort_of(7, (500, 7))
    ours, theirs = (OneRankOf(name, messages, rank).aggregator for rank in (0, 1))
    sent: list[torch.Tensor] = []
    theirs.reduce(lambda tensor: sent.append(tensor.clone()))
    waiting = iter(sent)
    ours.reduce(lambda tensor: tensor.add_(next(waiting)))
    found, alone = ours.finish(), aggregate(name, messages)
    assert vector(found).tobytes() == vector(alone).tobytes()
    assert found.discarded == alone.discarded


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("krum", {"f": 2}, 7),
        ("multi_krum", {"f": 1, "m": 6}, 7),
        ("krum", {"f": 1, "bucketing": 2}, 9),
        ("trimmed_mean", {"beta": 0.1}, 10),
        ("trimmed_mean", {"beta": 0.3}, 4),
        ("trimmed_mean", {"beta": 0.0}, 1),
        ("median", {}, 3),
        ("geometric_median", {"bucketing": 3}, 7),
        ("norm_clip", {}, 1),
    ],
)
def test_rules_say_how_many_updates_they_need(name: str, options: dict[str, Any], least: int) -> None:
    section = Aggregation(name=name, **options)
    assert section.find().least(section.options) == least
    if least > 1:
        with pytest.raises(TooFewUpdates):
            aggregate(name, cohort_of(least - 1, (10,)), **options)
    aggregate(name, cohort_of(least, (10,)), **options)


@pytest.mark.parametrize(
    ("aggregation", "keys", "message"),
    [
        ({"name": "krum", "f": 2}, {}, '"krum" with f = 2 needs 7 updates a cycle, but cohorts have as few as 6'),
        ({"name": "trimmed_mean", "beta": 0.1}, {}, "with beta = 0.1 needs 10 updates"),
        ({"name": "median", "bucketing": 3}, {}, '"median" with bucketing = 3 needs 7 updates'),
        ({"name": "median"}, {"algorithm": {"name": "fednova"}}, '"fednova" weights or scales them'),
        ({"name": "norm_clip", "norm": 1.0}, {"algorithm": {"name": "scaffold"}}, "also sends variate: use times"),
        ({"name": "norm_clip", "norm": 1.0, "times": 2.0}, {}, "has both norm and times"),
        ({"name": "trimmed_mean", "beta": 0.5}, {}, "aggregation.beta = 0.5 is not allowed"),
        ({"name": "krum", "f": -1}, {}, "aggregation.f = -1 is not allowed"),
        ({"name": "median", "f": 1}, {}, 'f is an option of name = "krum" or "multi_krum"'),
        ({"name": f"{__name__}:Old"}, {}, r"needs a method accumulate\(message, weight, device\)"),
    ],
)
def test_what_a_rule_cannot_bear_is_refused(
    aggregation: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(fedcluster.FedClusterError, match=message):
        fedcluster.run(
            fedcluster.Experiment(**KEYS | keys, aggregation=aggregation), tmp_path / "run", display=Display()
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class Old(Mean):
    """An aggregator as version 0.1 had them."""

    def accumulate(self, message: Any, weight: float) -> None:  # type: ignore[override]
        super().accumulate(message, weight)


def trained(folder: Path | None = None, options: dict[str, Any] | None = None, **keys: Any) -> fedcluster.Result:
    return fedcluster.run(fedcluster.Experiment(**KEYS | keys), folder, display=Display(), **options or {})


def weights_of(result: fedcluster.Result) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in result.model.parameters())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_every_rule_trains_and_workers_change_nothing(name: str, algorithm: str) -> None:
    keys: dict[str, Any] = {"aggregation": {"name": name}, "algorithm": {"name": algorithm}}
    alone, together = (trained(options={"workers": workers}, **keys) for workers in (1, 2))
    assert weights_of(alone) == weights_of(together)
    assert alone.history[-1]["train_loss"] < 10
    stacked = trained(options={"cohorts": "stacked"}, **keys)
    assert stacked.history[-1]["train_loss"] == pytest.approx(alone.history[-1]["train_loss"], rel=1e-3)


def test_a_run_without_malice_is_the_means_where_a_rule_cuts_nothing() -> None:
    mean = weights_of(trained())
    assert weights_of(trained(aggregation={"name": "multi_krum", "f": 0})) == mean
    assert weights_of(trained(aggregation={"name": "norm_clip", "times": 1e30})) == mean
    assert weights_of(trained(aggregation={"name": "norm_clip", "times": 0.5})) != mean


def test_centralized_training_has_no_cohorts_and_takes_the_mean() -> None:
    plain, krum = (trained(method="centralized", aggregation={"name": name}) for name in ("mean", "krum"))
    assert weights_of(plain) == weights_of(krum)


def test_who_was_discarded_is_written_down_and_a_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"aggregation": {"name": "norm_clip", "times": 0.9, "bucketing": 2}}
    whole = trained(tmp_path / "whole", **keys)
    trained(tmp_path / "parts", **keys | {"rounds": 1})
    fedcluster.run(fedcluster.Experiment(**KEYS | keys), tmp_path / "parts", resume=True, display=Display())
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert models[0] == models[1]
    lines = [json.loads(line) for line in (tmp_path / "whole/cycles.jsonl").read_text().splitlines()]
    named = [device for line in lines for device, _ in line.get("discarded", [])]
    assert named
    assert all(device in line["cohort"] for line in lines for device, _ in line.get("discarded", []))
    assert whole.history[-1]["discarded"] == len(named)
    again = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert [line["discarded"] for line in again] == [line["discarded"] for line in whole.history]


def test_a_cycle_with_too_few_updates_fails_and_leaves_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Six devices are asked; in one cycle some of them send what is refused, and Krum needs five."""
    honest = InProcess.train_device

    def train_device(self: InProcess, phase: int, place: Any, received: Any, kept: Any) -> Any:
        message, kept = honest(self, phase, place, received, kept)
        if place[:2] == (1, 0) and place[2] % 2:
            message = {name: tensor * math.nan for name, tensor in message.items()}
        return message, kept

    monkeypatch.setattr(InProcess, "train_device", train_device)
    trained(tmp_path / "run", aggregation={"name": "krum"}, algorithm={"name": "scaffold"})
    lines = [json.loads(line) for line in (tmp_path / "run/cycles.jsonl").read_text().splitlines()]
    (failed,) = [line for line in lines if not line["changed"]]
    assert (failed["round"], failed["cycle"], failed["too_few"]) == (2, 0, 6 - failed["refused"])
