"""Compiled or not, cached on disk or not, alone or eight at once: the same results, in real processes."""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import forge_packing
from forge_packing import Cost, pack_rows
from forge_packing.dividing import _compile
from forge_packing.dividing._divide import divide_steps

pytestmark = pytest.mark.slow

# Packs 20,000 samples twice: plain below the threshold, then compiled. Prints where the compiled code came from.
PACK = """
import hashlib, sys
import numpy as np
from forge_packing import pack_rows
from forge_packing.dividing import _compile
assert sys.modules.get("numba") is None
lengths = np.random.default_rng(0).integers(1, 3000, 20_000)
def digest():
    return hashlib.sha256(np.concatenate(pack_rows(lengths, 8192)).tobytes()).hexdigest()
plain = digest()
assert sys.modules.get("numba") is None, "numba was imported for a small input"
assert digest() == plain
kernel = _compile.compiled("pack")
hits = sum(kernel.stats.cache_hits.values()) if kernel else -1
print(plain, hits, kernel.stats.cache_path if kernel else None)
"""


KERNELS = Path("forge_packing/dividing/kernels")


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, a home, and an environment in which only these two are found."""
    site, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    shutil.copytree(Path(forge_packing.__file__).parent, site / "forge_packing", ignore=shutil.ignore_patterns("__pycache__"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    return site, home, {**kept, "PYTHONPATH": str(site), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def start():
    """Start Python processes, which are killed and reaped with the test, however it ends."""
    with ExitStack() as stack:

        def run(environment, code=PACK):
            command = [sys.executable, "-c", code]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, env=environment, text=True, **pipes))
            stack.callback(process.kill)  # before the process' own context, which closes its pipes and waits
            return process

        yield run


def forbid(directory):
    """Let no user write there, root included: it is a file."""
    directory.write_text("")


def finish(process):
    """(digest of the rows, times that cached code was loaded, where it is cached, stderr)."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    digest, hits, where = out.split()
    return digest, int(hits), where, err


def cached_files(directory):
    return sorted(path for path in directory.rglob("*.nb[ci]"))


def expected():
    """The digest of the rows that this process packs."""
    lengths = np.random.default_rng(0).integers(1, 3000, 20_000)
    return hashlib.sha256(np.concatenate(pack_rows(lengths, 8192)).tobytes()).hexdigest()


def test_cached_beside_the_source(installed, start):
    """The first process compiles and caches; the next one loads; torn files are written anew."""
    site, home, environment = installed
    first = finish(start(environment))
    assert first[:2] == (expected(), 0)
    assert first[2] == str(site / KERNELS / "__pycache__")
    assert finish(start(environment))[:2] == (first[0], 1)
    assert cached_files(home) == []
    for file in cached_files(site):
        file.write_bytes(file.read_bytes()[:10])
    assert finish(start(environment))[:2] == (first[0], 0)
    assert finish(start(environment))[:2] == (first[0], 1)


def test_read_only_install(installed, start):
    """Where the package may not be written to, the code is in the user's cache."""
    site, home, environment = installed
    forbid(site / KERNELS / "__pycache__")
    first = finish(start(environment))
    assert first[:2] == (expected(), 0)
    assert Path(first[2]).is_relative_to(home)
    assert cached_files(home)
    assert finish(start(environment))[:2] == (first[0], 1)


def test_nothing_may_be_written(installed, start):
    """Where nothing may be written at all, each process compiles for itself, and prints nothing."""
    site, home, environment = installed
    forbid(site / KERNELS / "__pycache__")
    forbid(home / ".cache")
    digest, hits, where, err = finish(start(environment))
    assert (digest, hits, where, err) == (expected(), 0, "None", "")
    assert cached_files(site) == []


@pytest.mark.lane
def test_eight_processes_at_once(installed, start):
    """Eight processes that start on an empty cache all get the right rows, and leave code that a ninth can load."""
    _, _, environment = installed
    processes = [start(environment) for _ in range(8)]
    found = [finish(process) for process in processes]
    assert {digest for digest, *_ in found} == {expected()}
    assert finish(start(environment))[:2] == (expected(), 1)


def test_without_numba(installed, start):
    """Where numba cannot be imported, Python does the same, with one warning."""
    _, _, environment = installed
    broken = "import sys\nfrom unittest import mock\nmock.patch.dict(sys.modules, numba=None).start()\n"
    digest, hits, _, err = finish(start(environment, broken + PACK))
    assert (digest, hits) == (expected(), -1)
    assert err.count("numba cannot be imported") == 1


def test_numba_set_not_to_compile(installed, start):
    """NUMBA_DISABLE_JIT leaves the work to Python, with the same rows."""
    _, _, environment = installed
    assert finish(start({**environment, "NUMBA_DISABLE_JIT": "1"}))[:2] == (expected(), -1)


@pytest.fixture
def both(monkeypatch):
    """Run a function plain, then compiled; return both results."""

    def run(function):
        results = []
        for threshold in (10**12, 0):
            monkeypatch.setattr(_compile, "COMPILE_FROM", threshold)
            results.append(function())
        return results

    return run


@pytest.mark.parametrize("seed", range(20))
def test_compiled_equals_plain(both, seed):
    """Divisions of steps of all sizes, ranks and costs are the same in Python and compiled."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 200, 10)
    capacity = int(rng.choice([50, 8192, 65_536, 2**31 - 1]))
    drawn = rng.lognormal(np.log(capacity / rng.choice([2, 5, 30])), rng.choice([0.1, 0.8, 1.5]), sizes.sum())
    lengths = np.clip(drawn.astype(np.int64), 1, capacity)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    ranks = int(rng.choice([1, 2, 3, 8, 64]))
    cost = Cost(*rng.choice([0.5, 1.0, 1e-9, 3e7], 2))
    plain, compiled = both(lambda: divide_steps(lengths, starts, capacity, ranks, cost))
    for a, b in zip(plain, compiled, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("capacity", [1, 7, 100, 2**31 - 1])
def test_compiled_rows_equal_plain_ones(both, capacity):
    """Rows are the same too, for read-only input as well."""
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 300)
    lengths.setflags(write=False)
    plain, compiled = both(lambda: pack_rows(lengths, capacity))
    assert [row.tolist() for row in plain] == [row.tolist() for row in compiled]


def test_every_kernel_is_compiled_from_its_own_name():
    """Kernels share one namespace when they are compiled, so no two may have one name, and all names lead to their owner."""
    owners = {}
    for module in _compile._MODULES:
        for name, kernel in vars(module).items():
            if callable(kernel) and getattr(kernel, "__module__", "").startswith("forge_packing"):
                assert owners.setdefault(name, kernel) is kernel, name
    assert set(_compile._ENTRIES) <= set(owners) == set(_compile._KERNELS)


def test_the_cache_is_named_after_all_kernels(monkeypatch):
    """A change in any kernel, or in a constant of theirs, is a new name: code of another version is never loaded."""
    before = _compile._digest()
    names = [before]
    for change in ({"TRIES": 1}, {"MOST": 2}):
        monkeypatch.setattr(_compile, "_CONSTANTS", {**_compile._CONSTANTS, **change})
        names.append(_compile._digest.__wrapped__())
    changed = {**_compile._KERNELS, "pop": _compile._KERNELS["push"]}
    monkeypatch.setattr(_compile, "_KERNELS", changed)
    names.append(_compile._digest.__wrapped__())
    assert len(set(names)) == 4
