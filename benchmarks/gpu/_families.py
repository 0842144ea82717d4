"""Correctness by model family: every type that transformers registers, tiny and random, trained on this device in float32."""

import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing import TimeoutError, get_context  # noqa: A004 - what a pool raises
from pathlib import Path
from typing import Any

from _here import Here, check

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

ASKED = ("built", "numbers")
"""Checks of tools/family_check.py: a step's loss and gradients beside plain transformers on a CPU."""
TOY = ("llama", "gpt_oss", "mamba2")
FAMILIES_A_PROCESS = 16
"""A new process costs what the device takes to open; one of whose kernels failed answers nothing more."""


SECONDS = 180.0
"""What has not been answered then, nor alone in half of that, is said to be unasked."""


@check("right")
def families(here: Here) -> tuple[bool, dict[str, Any]]:
    """Take a step with each model family: losses and gradients are those of plain transformers."""
    from family_configs import model_types

    types = list(TOY if here.toy else model_types())
    found = _asked(types, here.machine.name, SECONDS)
    # A process that a kernel's error has broken answers for others too: whatever failed is asked once more, alone.
    good = {name for name, answers in found.items() if all(answer["ok"] is not False for answer in answers.values())}
    found |= _asked([name for name in types if name not in good], here.machine.name, SECONDS / 2, alone=True)
    wrong = {
        name: {asked: answer["says"] for asked, answer in answers.items() if answer["ok"] is False}
        for name, answers in found.items()
        if any(answer["ok"] is False for asked, answer in answers.items() if asked != "built")
    }
    compared = [answers["numbers"] for answers in found.values() if answers.get("numbers", {}).get("ok") is not None]
    facts = {
        "types": len(types),
        "built": sum(answers["built"]["ok"] for answers in found.values()),
        "compared": len(compared),
        "right": sum(bool(answer["ok"]) for answer in compared),
        "packed": sum(bool(answer.get("packed")) for answer in compared),
        "largest_loss_difference": max((answer.get("loss", 0.0) for answer in compared), default=None),
        "largest_gradient_difference": max((answer.get("gradients", 0.0) for answer in compared), default=None),
        "wrong": wrong,
        "unasked": [name for name in types if name not in found],
    }
    return not wrong and not facts["unasked"], facts


def _asked(types: Iterable[str], device: str, seconds: float, *, alone: bool = False) -> dict[str, Any]:
    """Ask about each type, in as many processes as there are cores less one; what takes too long is left out."""
    workers, found, last = max(1, min(12, (os.cpu_count() or 2) - 1)), {}, time.monotonic() + seconds
    context = get_context("forkserver")
    # What opens no device: bitsandbytes does when it is imported, and so PEFT.
    context.set_forkserver_preload(["_families", "torch", "transformers", "forge"])
    # Leaving the pool ends its processes, also one that has not answered.
    with context.Pool(workers, maxtasksperchild=1 if alone else FAMILIES_A_PROCESS) as pool:
        answers = pool.imap_unordered(partial(_family, device=device), types)
        try:
            while True:
                name, answer = answers.next(timeout=max(0.0, last - time.monotonic()))
                found[name] = answer
        except (StopIteration, TimeoutError):
            return found


def _family(name: str, device: str) -> tuple[str, dict[str, Any]]:
    """Ask about one type; its name and its answers."""
    import tempfile
    import warnings

    import family_check
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    family_check.DEVICE = device
    with tempfile.TemporaryDirectory() as home:
        return name, family_check.check(name, Path(home), ASKED)
