"""Conditions of every test: no network, one thread, no deadlines. Imports no torch: a leaf's environment may have none."""

from __future__ import annotations

import os

import pytest
from hypothesis import is_hypothesis_test, settings

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
# `hatch run quick`: a first look, ten examples a law.
settings.register_profile("quick", settings.get_profile("forge"), max_examples=10)
settings.load_profile("forge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under the profile `quick` no law has more examples than that, also where its test asks for more."""
    most = settings.get_profile("quick").max_examples
    for item in items if settings.get_current_profile_name() == "quick" else []:
        test = getattr(item, "obj", None)
        if is_hypothesis_test(test):
            # Hypothesis' own place for a test's settings, as its pytest plugin reads it: @settings cannot be applied twice.
            asked = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(asked, max_examples=min(asked.max_examples, most))
