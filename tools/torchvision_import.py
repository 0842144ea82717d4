"""torchvision whose compiled operators this build of torch cannot load → torchvision that can be imported.

PyPI's wheels of torchvision are built for CUDA. Beside a CPU build of torch their library of operators does not load, and the
import ends at the first operator that Python code describes to `torch.compile`. The processors of transformers call no such
operator, only torchvision's transforms, which are Python; so the names are defined, without any code behind them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import torch

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
        said = " without its compiled operators, which this build of torch cannot load"
    return f"torchvision {importlib.import_module('torchvision').__version__}{said}"
