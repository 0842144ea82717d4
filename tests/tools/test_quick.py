"""Which tests `hatch run quick` chooses: on a branch, on main, with uncommitted changes, without main, without git."""

import subprocess
from pathlib import Path

import pytest
import quick
from repository import LAWS, packages

KNOWN = {"forge", "forge-data", "forge-dist"}
ROOT = Path(__file__).resolve().parents[2]


def test_a_branch_is_compared_with_where_it_left_main(repository):
    """What main gained since is not the branch's change."""
    left = repository.git("rev-parse", "HEAD")
    repository.git("switch", "--quiet", "--create", "work")
    repository.commit("packages/forge-data/a.py")
    repository.git("switch", "--quiet", "main")
    repository.commit("packages/forge-dist/b.py")
    repository.git("switch", "--quiet", "work")
    base, meaning = quick.base_of_change(repository.root)
    assert base == left
    assert "main" in meaning
    assert quick.changed_since(base, repository.root) == ["packages/forge-data/a.py"]


def test_uncommitted_staged_and_untracked_files_differ_too(repository):
    """The working tree counts, not the last commit; what git ignores does not."""
    repository.commit("packages/forge-data/a.py", "packages/forge-dist/b.py", ".gitignore")
    repository.write(".gitignore", "*.log\n")
    repository.git("commit", "--quiet", "--all", "--message", "ignore")
    repository.git("switch", "--quiet", "--create", "work")
    repository.write("packages/forge-data/a.py", "edited\n")
    repository.write("packages/forge-dist/staged.py")
    repository.git("add", "packages/forge-dist/staged.py")
    repository.write("tests/forge/test_new.py")
    repository.write("noise.log")
    base, _ = quick.base_of_change(repository.root)
    found = quick.changed_since(base, repository.root)
    assert found == ["packages/forge-data/a.py", "packages/forge-dist/staged.py", "tests/forge/test_new.py"]


def test_a_moved_file_differs_in_both_places(repository):
    """The package that lost a file differs as much as the one that got it."""
    repository.commit("packages/forge-data/a.py")
    repository.git("switch", "--quiet", "--create", "work")
    repository.write("packages/forge-dist/.keep")
    repository.git("mv", "packages/forge-data/a.py", "packages/forge-dist/a.py")
    base, _ = quick.base_of_change(repository.root)
    assert {"packages/forge-data/a.py", "packages/forge-dist/a.py"} <= set(quick.changed_since(base, repository.root))


def test_main_itself_is_compared_with_its_last_commit_or_with_origin(repository, tmp_path):
    """On main, what is not committed differs; where there is an origin, what is not pushed as well."""
    assert quick.base_of_change(repository.root) == ("HEAD", "Compared with the last commit of main")
    clone = type(repository)(tmp_path / "clone")
    subprocess.run(["git", "clone", "--quiet", repository.root, clone.root], check=True)
    clone.commit("packages/forge-data/a.py")
    base, meaning = quick.base_of_change(clone.root)
    assert "origin/main" in meaning
    assert quick.changed_since(base, clone.root) == ["packages/forge-data/a.py"]


def test_the_nearer_main_is_meant(repository, tmp_path):
    """A branch that was rebased onto origin's main is not compared with an old local one."""
    clone = type(repository)(tmp_path / "clone")
    subprocess.run(["git", "clone", "--quiet", repository.root, clone.root], check=True)
    repository.commit("packages/forge-dist/b.py")
    clone.git("fetch", "--quiet")
    clone.git("switch", "--quiet", "--create", "work", "origin/main")
    clone.commit("packages/forge-data/a.py")
    base, meaning = quick.base_of_change(clone.root)
    assert "origin/main" in meaning
    assert quick.changed_since(base, clone.root) == ["packages/forge-data/a.py"]


def test_a_clone_without_main_runs_everything_and_says_so(repository, tmp_path):
    """Nothing to compare with is no reason to run nothing."""
    repository.git("switch", "--quiet", "--create", "work")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--single-branch", "--branch", "work", repository.root, clone], check=True)
    base, meaning = quick.base_of_change(clone)
    assert base is None
    assert "no main" in meaning
    chosen, why = quick.tests_for(None, KNOWN, meaning)
    assert {"tests/forge", "tests/forge-data", "tests/forge-dist", "tests/whole"} == set(chosen)
    assert why == meaning


def test_without_git_everything_runs(tmp_path):
    """An unpacked archive has no history."""
    assert quick.base_of_change(tmp_path)[0] is None


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ([], []),
        (["docs/sft.md"], []),
        (["packages/forge-data/src/forge_data/a.py"], ["tests/forge-data"]),
        (["tests/forge-data/a/test_a.py", "packages/forge-dist/README.md"], ["tests/forge-data", "tests/forge-dist"]),
        (["tests/peers/test_a.py"], ["tests/peers"]),
        (["tools/quick.py"], ["tests/tools"]),
        ([".ci/run"], ["tests/tools"]),
    ],
)
def test_packages_that_differ_run_and_the_laws_always(changed, chosen):
    """A change's packages, the tools' own tests where a tool differs, and the laws whatever differs."""
    found, _ = quick.tests_for(changed, KNOWN, "Compared")
    assert found == [*chosen, *LAWS]


@pytest.mark.parametrize(
    "path", ["packages/forge/src/forge/a.py", "tests/whole/test_sft.py", "examples/a.py", "benchmarks/a.py"]
)
def test_the_facade_brings_the_whole(path):
    """Whole runs, examples and benchmarks are tested in tests/whole, which holds the laws too."""
    assert quick.tests_for([path], KNOWN, "Compared")[0] == ["tests/forge", "tests/whole"]


@pytest.mark.parametrize("path", quick.SHARED)
def test_what_all_tests_share_runs_everything(path):
    """A helper of every package's tests is a change of every package."""
    found, why = quick.tests_for([path], KNOWN, "Compared")
    assert {"tests/forge-data", "tests/forge-dist", "tests/forge", "tests/whole"} == set(found)
    assert path in why
    assert (ROOT / path).is_file()


def test_what_it_names_is_there():
    """Every test folder and every law that it may choose exists."""
    assert all((ROOT / f"tests/{folder}").is_dir() for folder in packages())
    assert all((ROOT / law).is_file() for law in LAWS)
