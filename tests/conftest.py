"""What every test runs under: no network, few threads, no clock. Imports no torch: a leaf's environment may hold none."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# Before torch or transformers is imported, and inherited by the processes that tests start. One thread: a tiny model gains
# nothing from more, and several processes that spin for the same cores take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On a machine with GPUs the tests are those of any other: they compare digits of float32, and fork ranks from a process in
# which a library may have opened a GPU. What runs on one is `benchmarks/gpu`.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# A test that reaches for the model hub is a test that fails elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# A shell lets what it starts in the background ignore Ctrl-C, and every process that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# And `nohup` a closed terminal.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A slow example is no bug (a timing is a benchmark, never a test), nor is one that a busy machine draws slowly. The examples
# of one commit are always the same, so that a failure is caused by the change; `--hypothesis-profile=explore` draws new ones.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("forge", **SLOW, print_blob=True, derandomize=True)
settings.register_profile("quick", settings.get_profile("forge"))
settings.register_profile("full", settings.get_profile("forge"))
settings.register_profile("explore", **SLOW, print_blob=True)
settings.load_profile("forge")

EXAMPLES = {"forge": lambda asked: max(5, asked // 10), "quick": lambda asked: 10}
"""Profile → how many examples it draws of those that a test asks for, which is 100 where it names no number.

Where no profile is named, as in CI, it is `forge`; `quick` is `hatch run quick`'s, `full` the lane `hatch run proofs`'s.
"""


def pytest_addoption(parser):
    """Add the option by which CI runs, of a leaf's tests, those that need more than the leaf."""
    what = "of the tests below this folder, only those marked `together`"
    parser.addoption("--only-together", action="append", default=[], metavar="FOLDER", help=what)


def pytest_collection_modifyitems(config, items):
    """Leave out what is run elsewhere, and lower the number of examples to what the chosen profile draws of them."""
    folders = [config.rootpath / folder for folder in config.getoption("--only-together")]
    here, elsewhere = [], []
    for item in items:
        below = any(item.path.is_relative_to(folder) for folder in folders)
        (here if not below or item.get_closest_marker("together") else elsewhere).append(item)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = here
    drawn = EXAMPLES.get(config.getoption("--hypothesis-profile") or "forge")
    for test in {getattr(item, "function", None) for item in items} if drawn else ():
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None:
            fewer = min(own.max_examples, drawn(own.max_examples))
            test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave garbage alone while tests are collected: what imports and tests are made of stays, and a fifth of the time goes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """Take what was imported out of the garbage collector's sight.

    A full collection looks at half a million objects of torch and transformers, a third of a second each time, and a run that
    tries a model in several ways collects after each. Of what is left in sight Python would look at the newest after every 700
    objects, and at all after every 70,000: a tenth of the time of tests that train a tiny model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fork the server of ranks, where a test module wants ranks, before a test does what may not be forked."""
    ranks = sys.modules.get(f"{__name__.rpartition('.')[0]}.ranks".lstrip("."))
    capture = session.config.pluginmanager.getplugin("capturemanager")
    slow = (item for item in session.items if item.get_closest_marker("slow"))
    wanted = any(hasattr(getattr(item, "module", None), "run_on_ranks") for item in slow)
    if ranks is None or not wanted or session.config.option.collectonly or capture is None:
        return
    # What ranks print belongs to the test's output, not to the session's.
    capture.resume_global_capture()
    try:
        ranks.fork_server()
    finally:
        capture.suspend_global_capture()
