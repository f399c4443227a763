"""`fedcluster privacy`: what rounds spend, the noise for other budgets, and what cycling costs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcluster.analysis import privacy as reports
from fedcluster.experiment import load
from fedcluster.runs.progress import Display
from tests.report.folders import data_in

KEYS: dict[str, Any] = {
    "rounds": 20,
    "fleet": {"devices": 60, "samples": 10},
    "clusters": {"count": 4, "participation": 0.5, "order": "cyclic"},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-3, "clip": 0.5, "mechanism": "banded"},
}


def test_a_report_on_bands(write_experiment: Callable[..., Path], tmp_path: Path) -> None:
    report = reports.build(load(write_experiment(**KEYS)), Display())
    assert [j for j, _ in report.epsilons if j in reports.milestones(20)] == [1, 2, 5, 10, 20]
    assert [epsilon for _, epsilon in report.epsilons] == sorted(epsilon for _, epsilon in report.epsilons)
    assert report.epsilons[-1][1] == pytest.approx(report.mechanism.epsilon(20))
    noise = [z for _, z in report.targets if z is not None]
    assert noise == sorted(noise, reverse=True)
    fedavg, gaussian, _, banded = report.costs
    assert fedavg.cycle == pytest.approx(2.0 / 30)
    assert gaussian.cycle == pytest.approx(2.0 / 7.5)
    assert [gaussian.round, gaussian.run] == pytest.approx([2.0, 2.0])  # sqrt(M)
    assert 1 < banded.run < banded.round < gaussian.round
    assert banded.name == "4 clusters, 4 bands"
    files = reports.write(report, tmp_path / "out")
    assert [file.name for file in files] == ["privacy.csv", "privacy.png"]
    assert files[0].read_text().splitlines()[:2] == ["round,epsilon", f"1,{report.epsilons[0][1]:.4g}"]


def test_the_command(write_experiment: Callable[..., Path], here: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = here("privacy", write_experiment(**KEYS), "-o", "rounds=3", "--out", "out", "--html", "page.html")
    assert data_in(Path("page.html"))["sentences"][0] in out.replace("\n", " ")
    assert code == 0
    assert "so 3 rounds are 3 sampled Gaussian mechanisms" in " ".join(out.split())
    assert "4 clusters, 2 bands" in out
    local = ["-o", "privacy.mechanism=local", "-o", "rounds=2"]
    code, out, _ = here("privacy", write_experiment(**KEYS), *local, "--out", "local")
    assert code == 0
    assert "4 clusters" not in out
    code, _, err = here("privacy", write_experiment(**KEYS | {"privacy": {}}))
    assert (code, "there is no differential privacy in this experiment" in err) == (2, True)
