"""Completion in the shell: it knows the registries without importing them, and files."""

from pathlib import Path

import pytest

from fedcluster.analysis.names import METHODS
from fedcluster.cli import completion
from fedcluster.cli.main import app
from fedcluster.experiment import SECTIONS, Part
from fedcluster.models.zoo import ZOO

PARTS = [name for name, section in SECTIONS.items() if issubclass(section, Part)]


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_those_of_the_registry(name: str) -> None:
    section = SECTIONS[name]
    assert issubclass(section, Part)
    assert list(completion.values(f"{name}.{section.key}")) == list(section.names())


def test_models_are_those_of_the_zoo() -> None:
    assert list(completion.values("model.name")) == list(ZOO)


def test_keys_then_values() -> None:
    assert completion.override("roun") == ["rounds=", "rounds=100"]
    assert {"local.batch=", "local.betas="} <= set(completion.override("local.b"))
    assert completion.override("algorithm.name=sc") == ["algorithm.name=scaffold"]
    assert completion.override("local.optimizer=ad") == ["local.optimizer=adam", "local.optimizer=adamw"]
    assert completion.override("local.nesterov=") == ["local.nesterov=true", "local.nesterov=false"]
    assert completion.override("data.name=mni") == ["data.name=mnist"]
    assert completion.override("nothing.x=") == []


def test_methods_are_named_once() -> None:
    assert completion.methods("fedavg,") == [f"fedavg,{name}" for name in METHODS if name != "fedavg"]
    assert completion.methods("fedavg,mi") == ["fedavg,minibatch"]


def test_data_sets_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "table.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCLUSTER_DATA", str(tmp_path / "none"))
    assert completion.data("s") == ["shakespeare", "sub/"]
    assert completion.data("sub/t") == ["sub/table.csv"]


def test_a_shell_is_answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As bash asks, through the script that --install-completion installs."""
    monkeypatch.setenv("_FEDCLUSTER_COMPLETE", "complete_bash")
    lines = {
        "fedcluster comp": "compare",
        "fedcluster compare --lr t": "tuned",
        "fedcluster run -o clusters.method = ba": "balanced",  # bash splits at =
        "fedcluster run -o clusters.method =": "timezone",
        "fedcluster run x.toml -o clusters.meth": "clusters.method=balanced",
    }
    for line, answer in lines.items():
        words = line.split()
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        completion.answer_bash(app)
        assert answer in capsys.readouterr().out.splitlines()
