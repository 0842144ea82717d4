"""Model, method and devices → bytes on each device, by forge's memory plan."""

from __future__ import annotations

import math
from typing import Any

import forge
import forge_dist
from forge._errors import SettingsError
from forge.hub._parameter import Parameter
from forge.hub._table import TRUST

_METHODS = {"sft": "none", "osft": "osft", "lora": "lora", "qlora": "qlora"}
_SHARE = 0.95
_TOKEN = 5


def estimate(
    training_method: str = "sft",
    num_gpus: int = 8,
    gpu_memory: int = 85899345920,
    model_path: str = "ibm-granite/granite-3.3-8b-instruct",
    batch_size: int | None = None,
    max_seq_len: int | None = None,
    max_tokens_per_gpu: int | None = None,
    use_liger: bool | None = None,  # noqa: ARG001 - training_hub's signature
    verbose: int = 1,
    trust_remote_code: bool = False,
    unfreeze_rank_ratio: float = 0.25,
    lora_r: int = 32,
) -> tuple[int, int, int]:
    """Compute the memory of a training on each device.

    A step is rehearsed without numbers: the loop, the optimizer and the model that would train, on rows as long as allowed.

    Args:
        training_method: sft, osft, lora or qlora.
        num_gpus: number of devices.
        gpu_memory: bytes of each.
        model_path: directory of the model, or its name on the Hugging Face Hub.
        batch_size: samples of a step over all devices; 8 for each by default.
        max_seq_len: tokens of the longest sample; by default what a device is given.
        max_tokens_per_gpu: most tokens of a micro-batch; by default a device's share of the step.
        use_liger: without effect: fused kernels hold no more than what is planned.
        verbose: 0 prints nothing, 1 the plan, 2 the assumptions too.
        trust_remote_code: refused, as in a training.
        unfreeze_rank_ratio: for osft, part of each weight that may move.
        lora_r: for lora and qlora, the rank.

    Returns:
        Bytes on the device that holds most: of a step, of the worst phase (saving and export included), and what the device
        must have for that, as some is lost between allocations.

    Raises:
        SettingsError: an argument is wrong, or the plan cannot be computed for this model.

    """
    method = str(training_method).lower()
    if method not in _METHODS:
        more = ": forge has one form of OSFT; give osft" if method == "osft-e" else ""
        raise SettingsError(f"estimate: training_method={training_method!r} is none of {', '.join(_METHODS)}{more}.")
    _refuse(TRUST, trust_remote_code)
    asked = {"num_gpus": num_gpus, "gpu_memory": gpu_memory, "batch_size": batch_size, "max_seq_len": max_seq_len}
    for name, value in {**asked, "max_tokens_per_gpu": max_tokens_per_gpu}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SettingsError(f"estimate: {name} must be a whole number of 1 or more, not {value!r}.")
    if max_tokens_per_gpu is None and max_seq_len is None:
        raise SettingsError("estimate: give max_seq_len, max_tokens_per_gpu, or both.")
    size = batch_size or 8 * num_gpus
    tokens, length = _tokens(num_gpus, size, max_seq_len, max_tokens_per_gpu)
    row = {"input_ids": [_TOKEN] * length, "labels": [_TOKEN] * length}
    rows = max(num_gpus, size, num_gpus * math.ceil(tokens / length))
    settings: dict[str, Any] = {
        "model_path": model_path,
        "data_path": [row] * rows,
        "data_format": "tokenised",
        "lint": "off",
        "adapter": _METHODS[method],
        "effective_batch_size": rows,
        "max_tokens_per_gpu": tokens,
        # A first step is made without the state of the optimizer, which later ones hold beside activations.
        "max_steps": 2,
        "num_epochs": None,
        **({"unfreeze_rank_ratio": unfreeze_rank_ratio} if method == "osft" else {}),
        **({"lora_r": lora_r} if "lora" in method else {}),
    }
    plan = _planned(settings, f"{num_gpus}xGPU-{gpu_memory / 2**30:.3f}GB")
    if plan["refused"] is not None:
        raise SettingsError(f"estimate: the memory of {model_path} cannot be computed: {plan['refused']}.")
    phases = {phase["name"]: int(phase["planned"]) for phase in plan["phases"]}
    worst = max(phases.values())
    if verbose:
        _say(method, plan, worst, gpu_memory, verbose)
    return phases["step"], worst, math.ceil(worst / _SHARE)


def _refuse(parameter: Parameter, value: object) -> None:
    if value is not None:
        parameter.settings("estimate", value, {})


def _tokens(num_gpus: int, size: int, longest: int | None, most: int | None) -> tuple[int, int]:
    """Return the tokens of a micro-batch, a device's share of the step, and of a row."""
    if longest is None:
        assert most is not None
        return most, most
    share = math.ceil(size / num_gpus) * longest
    tokens = share if most is None else min(most, share)
    if most is not None and most < longest:
        raise SettingsError(
            f"estimate: max_tokens_per_gpu={most} is less than max_seq_len={longest}, and no sample is cut: give at least that."
        )
    return tokens, longest


def _planned(settings: dict[str, Any], target: str) -> dict[str, Any]:
    """Return the memory plan of a run that is not made."""
    from forge.run._dry_run import rehearse
    from forge.run._rows import take_rows
    from forge.settings._settings import resolve

    task = forge.sft.task
    with forge_dist.temporary_folder() as folder:
        given, rows = take_rows({**settings, "ckpt_output_dir": str(folder / "run")})
        memory = rehearse(task, resolve(task.settings, ("argument", given)), rows, target=target, quiet=True).memory
        assert memory is not None
        return dict(memory)


def _say(method: str, plan: dict[str, Any], worst: int, gpu_memory: int, verbose: int) -> None:
    on = "one device" if plan["ranks"] == 1 else f"each of {plan['ranks']} devices"
    print(f"memory of {method} on {on}, a micro-batch of {plan['tokens']:,} tokens:")
    for phase in plan["phases"]:
        parts = ", ".join(f"{name} {number / 2**30:.2f}" for name, number in phase["parts"].items() if number)
        print(f"  {phase['name']:<11}{phase['planned'] / 2**30:>9.2f} GiB  ({parts})")
    if verbose > 1:
        for note in plan["notes"]:
            print(f"  {note}")
    verdict = "fits" if plan["fits"] else "does not fit"
    print(f"{worst / 2**30:.2f} GiB of {gpu_memory / 2**30:.2f} GiB: it {verdict}")
    for change in [] if plan["fits"] else plan["changes"]:
        verdict = "fits" if change["fits"] else "does not fit yet"
        named = " ".join(f"{name}={value}" for name, value in change["settings"].items())
        print(f"  {named}: {change['planned'] / 2**30:.2f} GiB, which {verdict}; {change['cost']}")
