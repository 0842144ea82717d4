"""Runs of `forge.sft` in processes of their own that receive a signal at a chosen moment.

Module-level functions, so that `run_on_ranks` can call them in a forked process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN: dict[str, Any] = {
    "num_epochs": 3,
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 128,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "full_state_every_steps": 1,
    "logging_steps": 100,
}
"""3 epochs × 4 steps over the 24 conversations of `chats`, in several micro-batches a step."""

DROPOUT = {"adapter": "lora", "lora_r": 4, "lora_dropout": 0.3}

MOMENTS = {
    # name: (module, attribute path of a function that is called once or more a step)
    "forward": ("forge_algos.objectives._tokens", "BoundTokens.__call__"),
    "backward": ("torch", "Tensor.backward"),
    "optimizer": ("torch.optim", "AdamW.step"),
    "saving: begin": ("forge_dist.checkpoints._folder", "begin"),
    "saving: write": ("forge_dist.checkpoints._save", "write_file"),
    "saving: rename": ("forge_dist.checkpoints._folder", "finish"),
    "saving: latest": ("forge_dist.checkpoints._folder", "announce"),
    "pruning": ("forge_dist.checkpoints._folder", "prune"),
    "exporting": ("forge_dist", "export_model"),
    "checking": ("forge_dist", "check_export"),
    "result": ("forge.run._run", "write_result"),
    "copying": ("forge.storage._remote", "Remote.write"),
    "fetching": ("forge.storage._remote", "Remote.fetch"),
}


def sft(settings: dict[str, Any]) -> dict[str, Any]:
    """Run `forge.sft` and return its result as JSON."""
    import forge

    # A finished run keeps its last states, by which runs are compared.
    result = forge.sft(**{"keep_full_state": True, **settings})
    return {"steps": result.steps, "samples": result.samples, "loss": result.loss, "model_dir": str(result.model_dir)}


def signal_at(moment: str, count: int, when: str | float, number: int | Callable[[], None] = signal.SIGKILL) -> None:
    """Make this process send itself a signal around the `count`-th call (from 1) of what `moment` names.

    `when` is "before" it, "after" it, or so many seconds after it began. A function may stand in the place of a signal.
    """
    import importlib
    import threading

    module, path = MOMENTS[moment]
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    def send() -> None:
        number() if callable(number) else os.kill(os.getpid(), number)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            send()
        if calls == count and isinstance(when, float):
            threading.Timer(when, send).start()
        found = original(*args, **kwargs)
        if calls == count and when == "after":
            send()
        return found

    setattr(owner, name, counted)


def sft_with_signal(settings: dict[str, Any], *moment: Any) -> dict[str, Any]:
    """Run `forge.sft` with the signal of `signal_at`."""
    signal_at(*moment)
    return sft(settings)


def sft_copied(settings: dict[str, Any], *moment: Any) -> dict[str, Any]:
    """Run `forge.sft`, whose copies are made at once, with the signal of `signal_at` if one is given."""
    from forge.storage import _storage

    _storage._LOOK_SECONDS = 0.01
    return sft_with_signal(settings, *moment) if moment else sft(settings)


def command_with_signal(words: list[str], *moment: Any) -> tuple[int, str]:
    """Run the command `forge` with the signal of `signal_at`; its exit status, and what it printed on stderr."""
    import contextlib
    import io

    from forge.cli._app import main

    signal_at(*moment)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = main(words)
    return status, printed.getvalue()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock and the machine."""
    return [
        {name: value for name, value in line.items() if name not in ("time", "tokens_per_second", "memory")}
        for line in metrics(run)
    ]


def weights(run: Path) -> dict[str, bytes]:
    """The bytes of every exported weight file, by name."""
    return {str(file.relative_to(run)): file.read_bytes() for file in sorted(run.glob("hf_format/*/*.safetensors"))}


def final_state(run: Path) -> tuple[str, dict[str, bytes]]:
    """The newest full state's name, and the bytes of its tensors."""
    latest = (run / "full_state" / "latest").read_text().strip()
    files = sorted((run / "full_state" / latest).glob("*.safetensors"))
    return latest, {file.name: file.read_bytes() for file in files}


def damaged(file: Path, how: str, other: Path) -> None:
    """Damage a file."""
    if how == "deleted":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif how == "bit flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(bytes(data))
    else:
        shutil.copy(other, file)
