"""Hatch's hooks: compiled kernels go into wheels, and the README and the URLs of a distribution know the repository.

The repository is $FEDCLUSTER_REPOSITORY, or else git's remote `origin`. Without either, a distribution names no
repository, and its README has no pictures and no links to files.
"""

import os
import platform
import re
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

KERNELS = Path("fedcluster", "models", "kernels")
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)")
SSH = re.compile(r"git@([^:]+):(.+)")


class KernelsHook(BuildHookInterface):
    """Compiles the engine for every generation of processors that a wheel for this platform may meet. Without a C
    compiler, or with FEDCLUSTER_PURE=1, the wheel is pure, and the engine is built on first use."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable" or os.environ.get("FEDCLUSTER_PURE"):
            return
        root = Path(self.root)
        build = runpy.run_path(str(root / KERNELS / "build.py"))
        prebuilt = runpy.run_path(str(root / KERNELS / "prebuilt.py"))
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return
        self.folder = tempfile.TemporaryDirectory()
        for generation in prebuilt["GENERATIONS"]:
            name = prebuilt["file_name"](generation)
            try:
                path = build["build"](Path(self.folder.name), [f"-march={generation}"], name, trial=False)
            except build["BuildFailed"] as error:
                self.app.display_warning(f"a pure wheel: {error}")
                return
            build_data["force_include"][str(path)] = str(KERNELS / "prebuilt" / name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


class RepositoryHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        url = repository(Path(self.root))
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(readme, url, f"v{metadata['version']}", Path(self.root))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Paper": "https://arxiv.org/abs/2009.10748"}
        if url:
            file = file_url(url, "blob", f"v{metadata['version']}")
            metadata["urls"] |= {
                "Homepage": url,
                "Documentation": f"{file}/docs/index.md",
                "Changelog": f"{file}/CHANGELOG.md",
                "Issues": f"{url}/issues" if "github.com" in url else f"{url}/-/issues",
            }


def repository(root: Path) -> str:
    """The repository's address as a browser takes it, or nothing. Credentials are left out."""
    given = os.environ.get("FEDCLUSTER_REPOSITORY", "")
    if not given and (root / ".git").exists():
        command = ["git", "remote", "get-url", "origin"]
        given = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
    if ssh := SSH.fullmatch(given):
        given = f"https://{ssh[1]}/{ssh[2]}"
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return ""
    return f"https://{parts.hostname}{parts.path}".rstrip("/").removesuffix(".git")


def file_url(url: str, kind: str, version: str) -> str:
    return f"{url}/{kind}/{version}" if "github.com" in url else f"{url}/-/{kind}/{version}"


def absolute(readme: str, url: str, version: str, root: Path) -> str:
    """The README with links that hold elsewhere. Without a repository, pictures go, and links become their text."""

    def replace(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if not url:
            return "" if picture else text
        kind = "raw" if picture else "tree" if Path(root, target).is_dir() else "blob"
        return f"{picture}[{text}]({file_url(url, kind, version)}/{target})"

    return LINK.sub(replace, readme)
