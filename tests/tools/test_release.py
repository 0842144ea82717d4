"""What a release is refused for, and which versions it is tested beside."""

import pytest
import release
from repository import packages


@pytest.fixture
def family(repository):
    """A facade and two leaves, each released once; then forge-data is at 1.1.0, and its changelog says so."""
    repository.package("forge-data", "1.0.0")
    repository.package("forge-dist", "2.0.0")
    repository.package("forge", "5.0.0", '"forge-data>=1,<2", "forge-dist>=2,<3"', distribution="forge-llm")
    repository.commit(message="first releases")
    for tag in ("forge-data-v1.0.0", "forge-dist-v2.0.0", "forge-llm-v5.0.0"):
        repository.git("tag", tag)
    repository.package("forge-data", "1.1.0")
    repository.commit(message="forge-data 1.1.0")
    return repository


def problems(family, folder="forge-data"):
    return release.problems(packages(family.root)[folder])


def test_a_release_in_order_has_no_problem(family):
    """Version, changelog and tag agree."""
    assert problems(family) == []


def test_each_fault_is_named(family):
    """Uncommitted changes, another version on top, an empty entry, a used tag, a version that does not follow, no change."""
    family.write("README.md", "edited")
    assert problems(family) == ["the working tree has uncommitted changes"]
    family.commit()
    family.package("forge-data", "1.1.0", notes="")
    family.commit()
    assert problems(family) == ["CHANGELOG.md says nothing about 1.1.0"]
    family.write("packages/forge-data/CHANGELOG.md", "# Changelog\n\n## 1.0.9\n\n- A.\n")
    family.commit()
    assert problems(family) == ["__version__ is 1.1.0, and CHANGELOG.md begins with 1.0.9"]
    family.package("forge-data", "0.9.0")
    family.commit()
    assert problems(family) == ["0.9.0 does not follow forge-data-v1.0.0"]
    family.package("forge-data", "1.1.0")
    family.commit()
    family.git("tag", "forge-data-v1.1.0")
    assert problems(family) == ["the tag forge-data-v1.1.0 is there already"]
    assert problems(family, "forge-dist") == ["the tag forge-dist-v2.0.0 is there already"]
    family.git("tag", "--delete", "forge-data-v1.1.0")
    family.git("tag", "forge-data-v1.0.5")
    assert problems(family) == ["nothing in packages/forge-data differs from forge-data-v1.0.5"]


def test_a_facade_asks_for_what_is_there(family):
    """The facade's ranges hold the leaves' versions of its own commit."""
    family.package("forge-dist", "3.0.0")
    family.package("forge", "5.1.0", '"forge-data>=1,<2", "forge-dist>=2,<3"', distribution="forge-llm")
    family.commit()
    (found,) = problems(family, "forge")
    assert found.startswith("forge-llm 5.1.0 asks for forge-dist<3,>=2, not for 3.0.0")


def test_the_greatest_tag_is_the_last_release(family):
    """Versions are compared as versions, and another package's tags are not this one's."""
    family.git("tag", "forge-data-v1.10.0")
    family.git("tag", "forge-data-v1.9.0")
    family.git("tag", "forge-data-extra-v7.0.0")
    known = packages(family.root)
    assert release.last_release(known["forge-data"]) == "forge-data-v1.10.0"
    assert release.last_release(known["forge"]) == "forge-llm-v5.0.0"


def test_new_meets_released_and_released_meets_new(family, monkeypatch, capsys):
    """The new leaf meets the released facade and leaves; the released leaf meets what is here; failures are reported."""
    family.package("forge-dist", "2.1.0")
    family.commit()
    seen = []

    def tested(mixed, folder, more):
        assert more == ["-m", "not slow"]
        seen.append({name: (package.version, package.root == family.root) for name, package in mixed.items()})
        return ["tests/a.py::test_b"]

    monkeypatch.setattr(release, "tested", tested)
    failed = release.test_beside_released(packages(family.root)["forge-data"], ["-m", "not slow"])
    assert seen == [
        {"forge-data": ("1.1.0", True), "forge-dist": ("2.0.0", False), "forge": ("5.0.0", False)},
        {"forge-data": ("1.0.0", False), "forge-dist": ("2.1.0", True), "forge": ("5.0.0", True)},
    ]
    assert failed == ["new beside released: tests/a.py::test_b", "released beside new: tests/a.py::test_b"]


def test_what_never_meets_is_said_and_not_tested(family, monkeypatch, capsys):
    """A leaf that the released facade does not ask for is never installed beside it."""
    family.package("forge-data", "2.0.0")
    family.commit()
    monkeypatch.setattr(release, "tested", lambda mixed, folder, more: [])
    assert release.test_beside_released(packages(family.root)["forge-data"], []) == []
    printed = capsys.readouterr().out
    assert "forge-llm 5.0.0 asks for forge-data<2,>=1, not for 2.0.0" in printed


def test_without_a_released_facade_it_says_so(repository, capsys):
    """Before the first release of the facade there is nothing to be tested beside."""
    repository.package("forge-data", "1.0.0")
    repository.package("forge", "5.0.0", '"forge-data>=1,<2"', distribution="forge-llm")
    repository.commit()
    assert release.test_beside_released(packages(repository.root)["forge-data"], []) == []
    assert "forge-llm was never released" in capsys.readouterr().out


def test_a_leaf_that_was_never_released_comes_from_the_facades_release(family, tmp_path):
    """Its last released state is what the facade's tag holds."""
    family.git("tag", "--delete", "forge-dist-v2.0.0")
    family.package("forge-dist", "2.1.0")
    family.commit()
    found = release.released_source(packages(family.root)["forge-dist"], tmp_path / "out")
    assert found.version == "2.0.0"


def test_a_package_that_is_in_no_release_meets_the_released_others(family, monkeypatch, capsys):
    """A leaf that is newer than every tag is tested beside what is released; no other package is missed there."""
    family.package("forge-new", "0.1.0")
    family.commit()
    seen = []
    monkeypatch.setattr(release, "tested", lambda mixed, folder, more: seen.append(set(mixed)) or [])
    known = packages(family.root)
    assert release.test_beside_released(known["forge-new"], []) == []
    assert seen == [{"forge-data", "forge-dist", "forge", "forge-new"}]
    assert "forge-new is in no tag" in capsys.readouterr().out
    assert release.test_beside_released(known["forge-data"], []) == []
    assert seen[1:] == [{"forge-data", "forge-dist", "forge"}, {"forge-data", "forge-dist", "forge", "forge-new"}]


def test_a_tag_that_names_no_version_is_no_release(family):
    """Somebody's tag of a state is passed over."""
    family.git("tag", "forge-data-v1.0.0-before-the-move")
    assert release.last_release(packages(family.root)["forge-data"]) == "forge-data-v1.0.0"
    assert problems(family) == []


def test_without_git_nothing_is_released(family, monkeypatch):
    """A folder whose state nobody can tell is not taken for a clean one."""
    monkeypatch.setattr(release, "git", lambda *_, **__: None)
    assert problems(family) == ["git does not answer here: releases are tags of a git checkout"]
