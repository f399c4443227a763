"""The documentation: it builds without a warning, its code runs, and its commands and keys exist."""

import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

import fedcluster
from fedcluster.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "study" not in page.parent.name)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are not inside a tab."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def with_code(language: str) -> list[Path]:
    """Pages with such blocks. Those of deploy.md are parts of files of Flower's."""
    return [page for page in PAGES if blocks(page, language) and page.name != "deploy.md"]


def name(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """No broken link, no key, option or public name without a description."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rho_device" in (tmp_path / "reference" / "keys" / "index.html").read_text()
    for public in fedcluster.__all__:
        assert f"fedcluster.{public}" in (tmp_path / "reference" / "api" / "index.html").read_text()


@pytest.mark.parametrize("page", with_code("python"), ids=name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    runpy.run_path(str(script))


@pytest.mark.parametrize("page", with_code("toml"), ids=name)
def test_the_experiments_of_a_page_are_valid(page: Path) -> None:
    for block in blocks(page, "toml"):
        fedcluster.Experiment(**tomllib.loads(block))


def tabs(page: Path) -> list[str]:
    """The code of the tabs of a page."""
    found = re.findall(r"^    ```python\n(.*?)^    ```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for code in found]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "coming-from").glob("*.md")), ids=name)
def test_the_tabs_of_other_frameworks_are_code(page: Path) -> None:
    """FedCluster's is a valid experiment; Flower's, which is installed, is imported; the others compile."""
    ours, theirs = tabs(page)
    variables: dict[str, object] = {}
    exec(ours.partition("result =")[0], variables)  # noqa: S102 - our own page
    assert isinstance(variables["experiment"], fedcluster.Experiment)
    code = compile(theirs, str(page), "exec")
    if page.stem == "flower":
        pytest.importorskip("flwr")
        exec(code, {})  # noqa: S102 - our own page


def commands() -> Iterator[tuple[str, str]]:
    for page in [ROOT / "README.md", *PAGES]:
        for block in [*blocks(page, "sh"), *re.findall(r"(?:^    .*\n)+", page.read_text(), re.MULTILINE)]:
            for line in re.findall(r"^ *(fedcluster [a-z].*)$", block, re.MULTILINE):
                yield name(page) if page.name != "README.md" else "README.md", line


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_commands_and_options_exist(page: str, line: str) -> None:
    words = shlex.split(re.sub(r"[\[\]|]|\.\.\.", " ", line), comments=True)
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    command = root.commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)} <= known, page
