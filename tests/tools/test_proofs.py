"""`hatch run proofs`: every test that CI leaves out is run by the lane."""

import subprocess
import sys

import proofs
from repository import ROOT


def test_it_finds_the_tests_that_ci_leaves_out():
    """The tests marked `lane` are those that a plain run of pytest deselects; each is marked `slow` too."""
    found = proofs.marked()
    assert "tests/whole/test_benchmarks.py::test_over_ranks[dist_restart.py]" in found
    files = sorted({test.partition("::")[0] for test in found})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    for marks, status in (([], 0), (["-m", "not slow"], 5)):
        done = subprocess.run([*command, *marks], cwd=ROOT, capture_output=True, text=True, check=False)
        # 5: no test is left.
        assert done.returncode in {0, status}, done.stdout
        assert set(done.stdout.splitlines()).isdisjoint(found)


def test_the_table_has_every_test_and_says_what_failed():
    """A row a test; a failure makes the lane fail."""
    results = {
        "a::b": {"says": "1 passed in 3 s", "failed": []},
        "a::c": {"says": "0 passed, 1 failed in 2 s", "failed": ["a::c"]},
    }
    body, failed = proofs.summary(results)
    assert failed
    assert "`a::b` | 1 passed in 3 s" in body
    assert not proofs.summary({"a::b": results["a::b"]})[1]
