"""For every shipped recipe: the words of a short run of it on a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.settings._recipe import verb_of
from forge.settings._shipped import shipped

from .verbs import settings_of

if TYPE_CHECKING:
    from pathlib import Path

OWN = ("model_path", "data_path", "teacher_path", "reward", "max_new_tokens", "num_generations", "block_size")
"""Settings of `settings_of` that a recipe leaves to its user, or that a tiny model needs smaller."""


def words_of(name: str, model_dir: Path, folder: Path, run: Path, **more: Any) -> list[str]:
    """`recipes run NAME key=value ...`, with rows and rewards written to `folder`."""
    given = settings_of(str(verb_of(shipped()[name])), model_dir, folder)
    small = {key: value[0] if isinstance(value, tuple) else value for key, value in given.items() if key in OWN}
    few = {"max_steps": 2, "num_epochs": "null", "effective_batch_size": 4, "validation_split": 0.25, "max_tokens_per_gpu": 512}
    settings = {**small, **few, "ckpt_output_dir": run, **more}
    return ["recipes", "run", name, *(f"{key}={value}" for key, value in settings.items() if value != "null")]
