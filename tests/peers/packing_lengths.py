"""benchmarks/_lengths.py for the tests beside this file: one definition of the lengths, and of mini-trainer's packer."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("_lengths", Path(__file__).parents[2] / "benchmarks" / "_lengths.py")
assert _SPEC is not None
assert _SPEC.loader is not None
lengths = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lengths)
