"""Program that `forge serve` starts: transformers' server, whose list names its model."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any


def list_only(model: str) -> None:
    """Let `GET /v1/models` of this process list `model`.

    transformers 5.24 does so itself. Before, it lists what lies in the Hub's cache: it fails where there is no cache, does not
    list a directory, and lists models that it answers no request with, since it was given one.
    """
    from transformers.cli.serving.model_manager import ModelManager

    manager: Any = ModelManager
    if not hasattr(manager, "get_gen_models"):
        return
    entry = {"id": model, "object": "model", "created": 0, "owned_by": ""}

    def get_gen_models(*_: object) -> list[dict[str, Any]]:
        return [dict(entry)]

    manager.get_gen_models = staticmethod(get_gen_models)


if __name__ == "__main__":
    list_only(sys.argv[2])
    # The command of the very transformers that is installed beside this package, wherever its scripts are.
    (script,) = entry_points(group="console_scripts", name="transformers")
    script.load()()
