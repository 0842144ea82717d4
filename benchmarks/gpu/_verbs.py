"""Correctness by verb: each trains a tiny model on this device and on a CPU, in float32, to the same losses."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing import TimeoutError, get_context  # noqa: A004 - what a pool raises
from pathlib import Path
from typing import Any

from _here import Here, check

ROOT = Path(__file__).resolve().parents[2]
MOST, SECONDS = 1e-3, 150.0
"""Largest relative difference of a figure; and when what has not been answered is said to be unasked."""
EXACT = {"dtype": "float32", "compile": "off"}
COMPILED = {"dtype": "float32", "compile": "blocks"}
REFERENCE = {"device": "cpu", "compile": "off", "activation_offloading": False}
TOLD = ("kernels: ", "compile: ", "prefixes: ", "WARNING")
"""What is shown of a run's log."""
LORA = {"adapter": "lora", "lora_r": 4}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "sft, lora": ("sft", LORA),
    "sft, dora": ("sft", LORA | {"adapter": "dora"}),
    "sft, prefix": ("sft", {"adapter": "prefix"}),
    "sft, muon": ("sft", {"optimizer": "muon"}),
    "sft, alone": ("sft", {"packing": "off"}),
    "sft, selective": ("sft", {"activation_checkpointing": "selective"}),
    "sft, full, on the host": ("sft", {"activation_checkpointing": "full", "activation_offloading": True}),
    "sft, compiled": ("sft", COMPILED),
    "sft, fsdp2": ("sft", {"strategy": "fsdp2"}),
    "dpo, lora, compiled": ("dpo", LORA | COMPILED),
    "distill, lora": ("distill", LORA),
    "sdft, lora": ("sdft", LORA),
    "grpo, lora, compiled": ("grpo", LORA | COMPILED),
    "grpo, osft": ("grpo", {"adapter": "osft"}),
    "ppo, lora": ("ppo", LORA),
}
"""Runs beside the plain one of each verb."""
TOY = ("sft", "dpo", "grpo")


def _cases(*, toy: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a verb and settings for each name."""
    from tests.whole.verbs import VERBS

    return {verb: (verb, {}) for verb in (TOY if toy else VERBS)} | ({} if toy else MORE)


@check("right")
def verbs(here: Here) -> tuple[bool, dict[str, Any]]:
    """Run every verb on this device and on a CPU: the same losses and held-out figures, in float32."""
    sys.path.insert(0, str(ROOT))
    cases = _cases(toy=here.toy)
    found: dict[str, dict[str, Any]] = {}
    last = time.monotonic() + SECONDS
    context = get_context("forkserver")
    # What opens no device: bitsandbytes does when it is imported, and so PEFT.
    context.set_forkserver_preload(["_verbs", "torch", "transformers", "forge"])
    with context.Pool(max(1, min(12, (os.cpu_count() or 2) - 2))) as pool:
        answers = pool.imap_unordered(partial(_run, device=here.machine.name), cases.items())
        try:
            while True:
                name, answer = answers.next(timeout=max(0.0, last - time.monotonic()))
                found[name] = answer
        except (StopIteration, TimeoutError):
            pass
    wrong = {name: answer for name, answer in found.items() if not answer.get("apart", 1.0) <= MOST}
    facts = {
        "apart": {name: answer["apart"] for name, answer in found.items() if "apart" in answer},
        "seconds_each": {name: answer["seconds"] for name, answer in found.items() if "seconds" in answer},
        "log": {name: answer["log"] for name, answer in found.items() if "log" in answer},
        "wrong": wrong,
        "unasked": [name for name in cases if name not in found],
    }
    return not wrong and not facts["unasked"], facts


def _run(case: tuple[str, tuple[str, dict[str, Any]]], device: str) -> tuple[str, dict[str, Any]]:
    """Run a case on the device and on a CPU; its name, and how far figures are apart."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    name, (verb, more) = case
    began = time.monotonic()
    try:
        return name, _compared(verb, more, device) | {"seconds": round(time.monotonic() - began, 1)}
    except BaseException as error:  # a verb's refusal ends a process
        return name, {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def _compared(verb: str, more: dict[str, Any], device: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from tests.whole.conftest import write_model
    from tests.whole.verbs import run_verb, settings_of

    with tempfile.TemporaryDirectory() as home:
        base = Path(home)
        given = settings_of(verb, write_model(base / "model"), base) | EXACT | more
        figures = []
        for name, own in (("here", {"device": device}), ("reference", REFERENCE)):
            run_verb(verb, given | own | {"ckpt_output_dir": str(base / name)}, str(base))
            figures.append(_figures(base / name))
        lines = (base / "here" / "log.txt").read_text(encoding="utf-8").splitlines()
        told = [line[:200] for line in lines if any(word in line for word in TOLD)]
    ours, theirs = figures
    if [each[:2] for each in ours] != [each[:2] for each in theirs]:
        return {"error": f"other figures: {sorted({each[1] for each in ours} ^ {each[1] for each in theirs})}"}
    return {"apart": max(abs(a - b) / max(abs(b), 0.1) for (*_, a), (*_, b) in zip(ours, theirs, strict=True)), "log": told}


def _figures(run: Path) -> list[tuple[int, str, float]]:
    """Return what a run's metrics hold of losses, norms and held-out rows."""
    lines: Iterable[dict[str, Any]] = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        (at, name, value)
        for at, line in enumerate(lines)
        for name, value in sorted(line.items())
        if isinstance(value, float) and (name in ("loss", "grad_norm", "reward", "kl") or name.startswith("eval_"))
        if "second" not in name
    ]
