"""Every public name, and every part that an experiment can name, has a docstring and is in the documentation."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.experiment import SECTIONS, LearningRateSchedule, Part, Section
from fedcluster.models.metrics import METRICS

ROOT = Path(fedcluster.__file__).parents[1]
NAMED: list[type[Section]] = [*SECTIONS.values(), LearningRateSchedule]
PARTS = [section for section in NAMED if issubclass(section, Part)]


def documentation() -> str:
    return "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


def own_docstring(obj: Any) -> str:
    """The docstring of a function or a class; not the one that a class inherits or that a dataclass makes up."""
    text = str((vars(obj).get("__doc__") if inspect.isclass(obj) else inspect.getdoc(obj)) or "")
    return "" if text.startswith(f"{getattr(obj, '__name__', '')}(") else text


@pytest.mark.parametrize("name", fedcluster.__all__)
def test_a_public_name_is_exported_explained_and_documented(name: str) -> None:
    exported = getattr(fedcluster, name)
    assert own_docstring(exported)
    assert re.search(rf"fedcluster\.{name}\b", documentation())


def test_public_names_are_those_that_type_checkers_see() -> None:
    """`import fedcluster` loads nothing: names are looked up on first use, and listed once more for type checkers."""
    assert sorted(fedcluster.HOME) == fedcluster.__all__
    source = Path(fedcluster.__file__).read_text()
    assert sorted(re.findall(r"^    from .* import (\w+) as \1$", source, re.MULTILINE)) == fedcluster.__all__


@pytest.mark.parametrize("section", PARTS)
def test_parts_that_can_be_named_are_explained_and_documented(section: type[Part]) -> None:
    documented = documentation()
    for name, part in section.names().items():
        part = getattr(part, "function", part)
        assert own_docstring(part) or own_docstring(sys.modules[part.__module__]), name
        assert re.search(rf'`"?{name}"?`', documented), name


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_documented(name: str) -> None:
    assert f"`{name}`" in documentation()
