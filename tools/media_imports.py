"""torchvision and torchaudio whose compiled operators this build of torch cannot load → ones that can be imported.

PyPI's wheels of both are built for CUDA. Beside a CPU build of torch their libraries of operators do not load. torchvision's
import then ends at the first operator that Python code describes to `torch.compile`, and torchaudio's at once. The processors
of transformers call no such operator, only transforms, which are Python; so torchvision's names are defined, without any code
behind them, and torchaudio is told that it has no library.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import torch

_WITHOUT = " without its compiled operators, which this build of torch cannot load"
_DESCRIBED = re.compile(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"')
"""Operators of which torchvision describes the shapes, in its own sources."""


def import_torchvision() -> str:
    """Import torchvision, which must come before transformers; return what is to be said of it, empty where it is not there."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return ""
    said = ""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        source = Path(found.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
        for name in set(_DESCRIBED.findall(source)):
            torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
        importlib.import_module("torchvision")
        said = _WITHOUT
    return f"torchvision {importlib.import_module('torchvision').__version__}{said}"


def import_torchaudio() -> str:
    """Import torchaudio before transformers does; return what is to be said of it, empty where it is not there."""
    if importlib.util.find_spec("torchaudio") is None:
        return ""
    said = ""
    try:
        importlib.import_module("torchaudio")
    except OSError:
        # What was imported of it before its library stays in sys.modules.
        sys.modules["torchaudio._extension.utils"]._load_lib = lambda _: False  # type: ignore[attr-defined]
        importlib.import_module("torchaudio")
        said = _WITHOUT
    return f"torchaudio {importlib.import_module('torchaudio').__version__}{said}"
