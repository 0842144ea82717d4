"""What every test runs under: no network, few threads, no clock. Imports no torch: a leaf's environment may hold none."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch or transformers is imported, and inherited by the processes that tests start. One thread: a tiny model gains
# nothing from more, and several processes that spin for the same cores take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that reaches for the model hub is a test that fails elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# A slow example is no bug (a timing is a benchmark, never a test). The examples of one commit are always the same, so that a
# failure is caused by the change; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("forge", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
# `hatch run quick`: ten examples a test, of those too that ask for more by themselves.
settings.register_profile("quick", settings.get_profile("forge"), max_examples=10)
settings.load_profile("forge")


def pytest_collection_modifyitems(config, items):
    """Lower the number of examples that a test asks for to the profile `quick`'s, where that is chosen."""
    if config.getoption("--hypothesis-profile") == "quick":
        quick = settings.get_profile("quick").max_examples
        for test in {getattr(item, "function", None) for item in items}:
            own = getattr(test, "_hypothesis_internal_use_settings", None)
            if own is not None and own.max_examples > quick:
                test._hypothesis_internal_use_settings = settings(own, max_examples=quick)
