"""A backend as another package has it: it writes down what it is asked for, and trains nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import forge
from forge.backends import Backend, Capabilities, read_request

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen(kw_only=True)
class OwnSettings:
    """Settings of the outside backend."""

    ink: str = attrs.field(default="blue", validator=attrs.validators.in_(("blue", "black")))
    """Colour in which it writes."""
    pages: int = attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    """Pages that it writes."""


class Scribe(Backend):
    """Writes params.json."""

    name = "scribe"
    Settings = OwnSettings
    refused = {"seed": "it draws nothing"}

    def capabilities(self) -> Capabilities:
        """Full training and LoRA, by two verbs, on one process of a CPU."""
        return Capabilities(verbs=("sft", "dpo"), adapters=("none", "lora"), strategies=("auto",), devices=("cpu",))

    def execute_training(self, params: Mapping[str, object]) -> forge.RunResult:
        """Write what was asked for."""
        task, s, rows, callbacks = read_request(self, params)
        run = Path(s.checkpoints.ckpt_output_dir)
        run.mkdir(parents=True)
        asked = {**params, "verb": task.name, "rows": {name: each.rows for name, each in rows.items()}}
        asked |= {"own": attrs.asdict(s.passed_on), "watched": bool(callbacks)}
        (run / "params.json").write_text(json.dumps(asked, default=str))
        if (made := os.environ.get("SCRIBES_MODEL")) is not None:
            shutil.copytree(made, run / "model")
        nothing: dict[str, Any] = dict.fromkeys(("eval_before", "eval_after", "best_step", "best_value"))
        done = {"steps": 1, "samples": 1, "skipped": 0, "loss": 1.0, "seconds": 0.0}
        return forge.RunResult(output_dir=run, model_dir=run / "model", **done, **nothing)

    def rehearse(self, params: Mapping[str, object], *, target: str | None = None) -> str:
        """Say what it would write."""
        return f"would write {params['pages']} pages in {params['ink']} for {target}"
