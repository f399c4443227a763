"""The noise that is really added, by simulation: its deviation, its covariance over cycles, and what an audit finds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from scipy.stats import beta

import fedcluster
from fedcluster.experiment import Privacy
from fedcluster.fleet.clustering.clusters import Clusters
from fedcluster.fleet.fleet import Fleet
from fedcluster.fleet.schedule import Cycle, Sampling, Schedule
from fedcluster.privacy import bands
from fedcluster.privacy.mechanism import build
from fedcluster.privacy.noisy_mean import ADAPTIVE, SHARE, Noise, NoisyMean, initial_server_state
from fedcluster.privacy.on_device import ClipOnDevice
from fedcluster.rng import stream
from fedcluster.state import State

NOBODY: Mapping[tuple[int, int], int] = {}
COHORT = 8
DELTA = 1e-3


def a_cycle(t: int, clusters: int, expected: float = COHORT) -> Cycle:
    nobody = np.zeros(0, np.int64)
    return Cycle(t // clusters, t % clusters, t % clusters, nobody, nobody, nobody, expected=expected)


def releases(
    n: int, cycles: int, z: float, clip: float | None = 1.0, used: int = 1, seed: int = 0, moved: Any = None
) -> list[torch.Tensor]:
    """Released movements of successive cycles, from W = 0; `moved(t)` has the models of the cohort of cycle t."""
    model = torch.zeros(n)
    state, released = State(model, initial_server_state(used, clip is None, model)), []
    for t in range(cycles):
        mean = NoisyMean({"model": model}, Noise(z, seed, NOBODY), clip, 1 / COHORT, state, a_cycle(t, max(used, 1)))
        for w in moved(t) if moved else ():
            mean.accumulate({"model": w}, 0.1)
        aggregate = mean.finish()
        state = State(model, state.server | aggregate.kept)
        released.append(aggregate.message["model"])
    return released


def test_the_deviation_of_the_noise_is_z_clip_over_the_expected_cohort() -> None:
    (release,) = releases(200_000, 1, z=3.0, clip=2.0)
    assert float(release.std()) == pytest.approx(3.0 * 2.0 / COHORT, rel=0.01)
    assert abs(float(release.mean())) < 0.01


def test_an_empty_cohort_and_absent_devices_count_as_no_movement() -> None:
    quiet = releases(50, 1, z=0.0)[0]
    assert (quiet == 0).all()
    one = releases(50, 1, z=0.0, moved=lambda t: [torch.full((50,), 0.1)])[0]
    assert torch.allclose(one, torch.full((50,), 0.1 / COHORT))


@pytest.mark.parametrize("used", [1, 2, 4])
def test_the_covariance_over_cycles_is_that_of_the_inverse_of_c(used: int) -> None:
    n, cycles, z = 40_000, 9, 1.5
    noise = torch.stack(releases(n, cycles, z, used=used)).double().numpy() * COHORT / z
    c = bands.coefficients(used)
    assert c @ c == pytest.approx(1)
    C = toeplitz(np.pad(c, (0, cycles - used)), np.zeros(cycles))
    inverse = np.linalg.inv(C)
    assert np.abs(noise @ noise.T / n - inverse @ inverse.T).max() < 0.05
    white = C @ noise  # what accounting sees: independent, of deviation 1
    assert np.abs(white @ white.T / n - np.eye(cycles)).max() < 0.03
    ones = np.concatenate([np.zeros(3), np.ones(cycles - 3)])
    assert bands.deviation_of_sum(used, cycles - 3, before=3) == pytest.approx(np.linalg.norm(ones @ inverse))


def test_columns_m_apart_are_orthogonal() -> None:
    M, T, used = 5, 4, 5
    c = bands.coefficients(used)
    C = toeplitz(np.pad(c, (0, M * T - used)), np.zeros(M * T))
    for K in range(M):
        own = C[:, K::M]
        products = own.T @ own
        assert np.allclose(products, np.diag(np.diag(products)))
        assert np.diag(products).max() == pytest.approx(1)


def test_movements_are_clipped_to_the_norm() -> None:
    far = torch.full((100,), 7.0)
    (release,) = releases(100, 1, z=0.0, clip=2.0, moved=lambda t: [far])
    assert float(release.double().norm()) == pytest.approx(2.0 / COHORT, rel=1e-6)


def test_a_device_clips_and_adds_noise_of_its_own() -> None:
    section = Privacy(noise_multiplier=1.0, delta=1e-5, clip=2.0, mechanism="local")
    origin, w = torch.ones(40_000), torch.ones(40_000) + 1

    def upload(secret: int, received: torch.Tensor, place: int = 1) -> torch.Tensor:
        transform = ClipOnDevice(section, 1.0, secret)
        return transform.on_device({"model": w}, {"model": received}, stream(0, "transform", place))["model"]

    moved = upload(7, origin) - origin
    assert float(moved.std()) == pytest.approx(2.0, rel=0.02)
    assert float(moved.mean()) == pytest.approx(2.0 / 200, abs=0.04)
    assert torch.equal(upload(7, origin), upload(7, origin))
    for other in (upload(8, origin), upload(7, origin * 1.0000001), upload(7, origin, place=2)):
        assert abs(np.corrcoef(moved, other - origin)[0, 1]) < 0.05  # another request is answered with other noise


def test_the_adaptive_clip_finds_the_median_movement_and_costs_its_share() -> None:
    norms = np.linspace(1, 9, COHORT)

    def moved(t: int) -> list[torch.Tensor]:
        return [torch.full((100,), float(norm) / 10) for norm in norms]

    model = torch.zeros(100)
    state = State(model, initial_server_state(1, True, model))
    for t in range(200):
        mean = NoisyMean({"model": model}, Noise(0.5, 0, NOBODY), None, 1 / COHORT, state, a_cycle(t, 3))
        for w in moved(t):
            mean.accumulate({"model": w}, 0.1)
        state = State(model, state.server | mean.finish().kept)
    assert 3 < float(state.server[ADAPTIVE]) < 7
    release = releases(100_000, 1, z=1.0, clip=None)[0]
    assert float(release.std()) == pytest.approx(0.1 / COHORT / np.sqrt(1 - SHARE), rel=0.02)


def shown(scores_in: Any, scores_out: Any, threshold: float) -> float:
    """The epsilon that an attacker with this threshold shows at 95 % confidence, by Clopper-Pearson intervals."""
    n, hits, alarms = len(scores_in), int((scores_in > threshold).sum()), int((scores_out > threshold).sum())
    low = beta.ppf(0.025, hits, n - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, alarms + 1, n - alarms) if alarms < n else 1.0
    return float(np.log(max(low - DELTA, 1e-12) / high))


def lower_bound(scores_in: Any, scores_out: Any) -> float:
    """The same where the threshold is chosen on one half of the models, and the rates are those of the other half."""
    half = len(scores_in) // 2
    thresholds = np.quantile(np.concatenate([scores_in[:half], scores_out[:half]]), np.linspace(0.02, 0.98, 49))
    best = max(thresholds, key=lambda threshold: shown(scores_in[:half], scores_out[:half], threshold))
    return shown(scores_in[half:], scores_out[half:], best)


def private(z: float, mechanism: str, rounds: int) -> fedcluster.Experiment:
    return fedcluster.Experiment(
        rounds=rounds,
        clusters={"count": 3, "participation": 0.9, "order": "cyclic"},
        privacy={"noise_multiplier": z, "delta": DELTA, "clip": 1.0, "mechanism": mechanism},
    )


def audit(z: float, mechanism: str, models: int = 1000, rounds: int = 2) -> tuple[float, float]:
    """Epsilon as a canary shows it in so many runs with it and without, and the epsilon that these runs report. The
    schedule draws the cohorts; the canary, device 0, moves as far as the clip along a direction that no other device
    takes. The attacker has all models, and undoes the correlation of the noise."""
    experiment, model = private(z, mechanism, rounds), torch.zeros(2)
    fleet, clusters = Fleet(np.full(6, 20)), Clusters(np.array([0, 0, 1, 1, 2, 2], np.int32), 3)
    scores, reported = np.zeros((2, models)), 0.0
    for present in (0, 1):
        for number in range(models):
            seed = 2 * number + present
            schedule = Schedule(experiment.clusters, fleet, clusters, seed, sampling=Sampling(seed, poisson=True))
            private_run = build(experiment, schedule)
            assert private_run is not None
            c, reported = bands.coefficients(private_run.bands), private_run.epsilon(rounds)
            state = State(model, private_run.initial_server_state(State(model)))
            x = []
            for cycle in [cycle for j in range(rounds) for cycle in schedule.round(j)]:
                mean = private_run.aggregator({"model": model}, state, cycle)
                for k in cycle.cohort.tolist():
                    mean.accumulate({"model": torch.tensor([float(present), 0.0] if k == 0 else [0.0, 1.0])}, 1.0)
                aggregate = mean.finish()
                state = State(model, state.server | aggregate.kept)
                x.append(float(aggregate.message["model"][0]) * cycle.expected)
            white = [sum(c[i] * x[t - i] for i in range(min(len(c), t + 1))) for t in range(len(x))]
            scores[present, number] = sum(c[i] * white[3 * j + i] for j in range(rounds) for i in range(len(c)))
    return lower_bound(scores[1], scores[0]), reported


@pytest.mark.parametrize("mechanism", ["gaussian", "banded"])
def test_a_canary_is_told_no_better_than_epsilon_allows(mechanism: str) -> None:
    found, epsilon = audit(1.5, mechanism)
    assert 0.3 < found < epsilon  # the attack works, and not too well
    assert audit(0.15, mechanism, models=500)[0] > epsilon  # it would notice a tenth of the noise
