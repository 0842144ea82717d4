"""Git repositories of a few files, for the tools that ask git. The tools are imported as their scripts import each other."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

PYPROJECT = """
[project]
name = "{distribution}"
dependencies = [{dependencies}]
"""


class Repository:
    """A git repository in a temporary folder."""

    def __init__(self, root):
        self.root = root

    def git(self, *arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, path, text="x\n"):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(self, *paths, message="change"):
        for path in paths:
            self.write(path, f"{path} {message}\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def package(self, folder, version, dependencies="", distribution=None, notes="- Something.\n"):
        distribution = distribution or folder
        self.write(f"packages/{folder}/pyproject.toml", PYPROJECT.format(distribution=distribution, dependencies=dependencies))
        self.write(f"packages/{folder}/src/{folder.replace('-', '_')}/__init__.py", f'__version__ = "{version}"\n')
        self.write(
            f"packages/{folder}/CHANGELOG.md", f"# Changelog of {folder}\n\n## {version}\n\n{notes}\n## 0.0.1\n\n- First.\n"
        )


@pytest.fixture
def repository(tmp_path):
    """An empty repository on branch main with one commit."""
    made = Repository(tmp_path / "repository")
    made.root.mkdir()
    made.git("init", "--quiet", "--initial-branch=main")
    made.commit("README.md")
    return made
