"""A manifest of Kubeflow Trainer V2 → YAML; and the names that its jobs and runtimes share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

API = "trainer.kubeflow.org"
API_VERSION = f"{API}/v1alpha1"
RUNTIMES = {"cpu": "forge-cpu", "gpu": "forge-gpu", "nodes": "forge-multi-node"}
"""Size (one node, one accelerator, any number of nodes) → name of the runtime."""
VOLUME = "initializer"
"""Name of the shared volume, by which Trainer V2 knows it."""
WORKSPACE = PurePosixPath("/workspace")
"""Where the shared volume is; the initializers fill `model` and `dataset` there."""


def dumped(manifest: Mapping[str, Any]) -> str:
    """Write a manifest as YAML."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30)


class _Dumper(yaml.SafeDumper):
    """Safe YAML dumper that writes text of several lines as a block, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the parent's signature
        return True


_QUOTED = re.compile(r"[yYnN]|[-+]?[\d._]+[eE][-+]?\d+|[-+]?0[oO]\d+")
"""Texts that other readers of YAML take for a switch or a number (y, 1e5, 0o17), and this one's writer leaves bare."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _QUOTED.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)
