"""Both ends of the declared ranges: read from the six pyproject.toml, and nothing else."""

import pytest
import versions
from packaging.version import Version
from repository import packages


def test_the_greatest_lower_bound_counts(repository):
    """Of two packages that declare one dependency both bounds hold; packages of the repository are left out."""
    repository.package("forge-data", "1.0.0", '"numpy>=1.26", "pyarrow>=19,<30", "old>=1; python_version < \'3.5\'"')
    repository.package("forge", "1.0.0", '"numpy>=2.0", "forge-data>=1,<2", "exact==4.2"', distribution="forge-llm")
    known = packages(repository.root)
    assert versions.floors(known) == {"exact": Version("4.2"), "numpy": Version("2.0"), "pyarrow": Version("19")}
    assert versions.declared(known)["numpy"] == "`>=1.26` forge-data; `>=2.0` forge"


def test_a_dependency_without_a_lower_bound_is_refused(repository):
    """A range that is open below cannot be tested at its end."""
    repository.package("forge-data", "1.0.0", '"numpy<3"')
    with pytest.raises(SystemExit, match="numpy<3 has no lower bound"):
        versions.floors(packages(repository.root))


def test_bounds_are_raised_to_what_another_asks_for(monkeypatch):
    """What cannot be installed together is raised as far as it must, and what that asks for in turn; torch stays."""
    needs = {
        ("a", "1"): ["b>=2", "torch>=9", "unknown>=3", "c>=9; extra == 'x'"],
        ("b", "1"): [],
        ("b", "2"): ["c>=1.5", "d"],
        ("c", "1"): [],
        ("c", "1.5"): [],
        ("torch", "2"): [],
    }
    monkeypatch.setattr(versions, "metadata", lambda bounds: {n: needs[n, str(v)] for n, v in bounds.items()})
    bounds, raised = versions.reachable({name: Version("2" if name == "torch" else "1") for name in ("a", "b", "c", "torch")})
    assert {name: str(version) for name, version in bounds.items()} == {"a": "1", "b": "2", "c": "1.5", "torch": "2"}
    assert raised == {"b": "a 1 asks for 2", "c": "b 2 asks for 1.5"}


def test_this_repository_declares_a_lower_bound_for_everything():
    """So that `hatch run matrix:lowest` can be run at all."""
    bounds = versions.floors(packages())
    assert {"torch", "transformers", "numpy", "attrs"} <= set(bounds)
    assert set(versions.declared(packages())) == set(bounds)


def test_one_end_leaves_the_others_section_alone(tmp_path):
    """Each run writes its own section of one page, again and again."""
    versions.write("lowest", "first", tmp_path)
    versions.write("newest", "second", tmp_path)
    versions.write("lowest", "third", tmp_path)
    text = (tmp_path / "versions.md").read_text()
    assert text.startswith(f"# {versions.TITLE}\n")
    assert "first" not in text
    assert "second" in text
    assert "third" in text
    assert text.count("## lowest\n") == text.count("## newest\n") == 1
