"""Imports point one way, and some libraries are used in one place only. See CONTRIBUTING.md."""

import ast
import importlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedcluster

ROOT = Path(fedcluster.__file__).parent
ORDER = ["", "data", "fleet", "models", "algorithms", "attacks", "privacy", "secure_aggregation", "runs", "training"]
ORDER += ["analysis", "report", "cli"]
ROOT_FOLDERS = {"experiment"}  # packages that belong to the root, with the package's own files
ENTRANCES = {"__init__.py", "__main__.py"}  # they name everything, and import it late
ONLY_IN = {
    "torch.distributed": ("training/executors/distributed.py",),
    "ctypes": ("models/kernels/", "allocator.py"),
    "rich": ("runs/progress.py", "runs/bars.py", "cli/"),
    "matplotlib": ("figures.py", "plots.py"),
    "flwr": ("flower/",),
    "dp_accounting": ("privacy/accounting.py",),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(module: str) -> str:
    """The first folder below the package that a module is in; empty for the root."""
    first = module.split(".")[1]
    return first if (ROOT / first).is_dir() and first not in ROOT_FOLDERS else ""


def may(source: str, target: str) -> bool:
    if source == "flower":
        return target not in ("analysis", "report", "cli")
    return target != "flower" and ORDER.index(target) <= ORDER.index(source) if source != "cli" else True


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        source = folder("fedcluster." + name.removesuffix(".py").replace("/", "."))
        for module in imports(path):
            ours = module.startswith("fedcluster.") and name not in ENTRANCES
            if ours and not may(source, folder(module)):
                wrong.append(f"{name} imports {module}")
            for library, places in ONLY_IN.items():
                inside = any(place in name for place in places)
                if not inside and (module + ".").startswith(library + "."):
                    wrong.append(f"{name} imports {module}")
    assert not wrong


PUBLIC_FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}


def test_private_names_of_flower_are_in_one_file() -> None:
    """Public are the names that Flower's public modules list; everything else goes through flower/_compat.py."""
    wrong = []
    for path in sorted((ROOT / "flower").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wrong += [f"{path.name}: {alias.name}" for alias in node.names if alias.name.startswith("flwr")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                public = importlib.import_module(node.module).__all__ if node.module in PUBLIC_FLOWER else ()
                wrong += [f"{path.name}: {node.module}.{one.name}" for one in node.names if one.name not in public]
    assert [found for found in wrong if not found.startswith("_compat.py")] == []


def test_the_package_says_that_it_has_types_and_exports_what_it_names() -> None:
    assert (ROOT / "py.typed").exists()
    assert all(hasattr(fedcluster, name) for name in fedcluster.__all__)
    assert sorted(fedcluster.__all__) == fedcluster.__all__


def test_every_folder_is_a_package_that_says_what_it_holds() -> None:
    for folder in sorted({path.parent for path in ROOT.rglob("*.py")}):
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_tests_mirror_the_folders() -> None:
    ours = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} - ROOT_FOLDERS
    theirs = {path.parent.name for path in Path(__file__).parent.glob("*/__init__.py")}
    assert theirs == ours


def test_git_ignores_no_part_of_the_project() -> None:
    """What git ignores is neither linted nor part of the wheel."""
    if shutil.which("git") is None or not (ROOT.parent / ".git").exists():
        pytest.skip("this is no git repository")
    files = "git", "ls-files", "--cached", "--others", "--ignored", "--exclude-standard", "--", "*.py", "*.c", "*.h"
    ignored = subprocess.run(files, cwd=ROOT.parent, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [path for path in ignored if path.startswith(("fedcluster/", "tests/", "torture/", "examples/"))]


def test_frozen_objects_are_set_up_by_themselves_alone() -> None:
    """A frozen dataclass or section may fill in its own fields; nothing changes another object's."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        for line in path.read_text().splitlines():
            rest = line.partition("object.__setattr__")[2]
            if rest and not rest.startswith(("(self,", ", self)")):
                wrong.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert not wrong
