"""Batch, length, schedule, optimizer and number format of another library's file → ours."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from forge.settings.convert._draft import Draft, plain
from forge.settings.convert._swift import accumulated

_OF_A_GPU = ("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size")
_BATCHES = {"TRL": 8, "LLaMA-Factory": 8, "Axolotl": 1, "ms-swift": 1}
"""Library → batch of a GPU where its file gives none: transformers' default, and Axolotl's own."""
GENERATIONS = {"grpo": 8, "rloo": 2}
"""Verb → TRL's number of completions of a prompt where a file gives none."""
_EPOCHS = ("num_train_epochs", "num_epochs")


def batch(draft: Draft) -> None:
    """Multiply the batch of one GPU by the steps that gradients are summed over."""
    left, library = draft.left, draft.library
    sizes = {key: left.pop(key) for key in (*_OF_A_GPU, "gradient_accumulation_steps") if key in left}
    if library == "Axolotl" and left.get("batch_size") is not None:
        sizes = {"batch_size": left.pop("batch_size")}  # the product, of one GPU
    sizes = {key: size for key, size in sizes.items() if size is not None}
    wrong = [f"{key}: {size!r}: is no whole number above 0" for key, size in sizes.items() if not _whole(size)]
    if wrong:
        draft.lost += wrong
        return
    steps = sizes.pop("gradient_accumulation_steps", None)
    own = next(iter(sizes.values()), None)
    each = (_BATCHES[library] if own is None else own) * (draft.ranks or 1)
    said: list[str] = []
    open_steps = steps is None and library == "ms-swift"
    if open_steps:
        steps = accumulated(each, draft.verb)
        if draft.verb not in GENERATIONS:
            said.append("ms-swift's default: gradients of 16 rows, or of one batch")
    if draft.verb in GENERATIONS:
        said += _prompts(draft, each, steps or 1)
    else:
        draft.found["effective_batch_size"] = each * (steps or 1)
    if own is None and not open_steps:
        said.append(
            f"{each // (draft.ranks or 1)} a GPU is {library}'s default"
            + (f", times gradient_accumulation_steps: {steps}" if steps else "")
        )
    if "effective_batch_size" not in draft.found:
        return
    note = "; ".join(said)
    if note:
        draft.comments["effective_batch_size"] = note
    if draft.ranks is not None or (open_steps and draft.verb not in GENERATIONS):
        return
    draft.lost.append(
        f"effective_batch_size: {draft.found['effective_batch_size']} is that of one GPU{f' ({note})' if note else ''}: "
        "multiply it by the number of GPUs that it was trained on"
    )


def _prompts(draft: Draft, each: int, steps: int) -> list[str]:
    """Turn TRL's batches of completions into prompts and updates; return what to say."""
    left, group = draft.left, draft.left.get("num_generations")
    group = group if _whole(group) else GENERATIONS[draft.verb]
    update = rollout = each * steps
    asked = {key: left.pop(key) for key in ("generation_batch_size", "steps_per_generation") if key in left}
    if _whole(asked.get("generation_batch_size")):
        rollout = asked["generation_batch_size"]
    elif _whole(asked.get("steps_per_generation")):
        rollout = each * asked["steps_per_generation"]
    if rollout % update:
        draft.lost.append(
            f"{next(iter(asked))}: the {rollout} completions of a rollout make no whole number of steps of {update}"
        )
        rollout = update
    if rollout % group:
        draft.lost.append(
            f"effective_batch_size: {rollout} completions on one GPU are no whole number of groups of {group}: give the "
            f"completions of all GPUs divided by {group}"
        )
        return []
    draft.found["effective_batch_size"] = rollout // group
    if rollout > update:
        draft.found["updates_per_pass"] = rollout // update
    return [f"prompts: {rollout} completions in groups of {group}"]


def _whole(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def length(draft: Draft) -> None:
    """Read epochs and steps: whole epochs, no steps where they are -1 there, and one of both."""
    left = draft.left
    if isinstance(left.get("max_steps"), int) and left["max_steps"] <= 0:
        del left["max_steps"]
    if left.get("report_to") in ("none", "all", ["none"], ["all"]):
        del left["report_to"]  # no tracker, or whichever is installed
    for key in _EPOCHS:
        epochs = left.get(key)
        if epochs is not None and _whole(left.get("max_steps")):
            draft.lose(key, "max_steps alone ends a run there, whatever the number of epochs")
        elif isinstance(epochs, float):
            left[key] = max(1, round(epochs))
            if left[key] != epochs:
                draft.lost.append(f"{key}: {epochs}: epochs are whole here; {left[key]} was taken")
    _warmup(draft)


def _warmup(draft: Draft) -> None:
    """Turn a share of the steps into warmup_ratio, or a number where max_steps is given."""
    left, steps = draft.left, draft.left.get("max_steps")
    if "constant" in (left.get("lr_scheduler_type"), left.get("lr_scheduler")):
        for key in ("warmup_ratio", "warmup_steps"):
            if left.get(key):
                draft.lose(key, "without effect there: the schedule `constant` has no warm-up, constant_with_warmup has")
        return
    if left.get("warmup_ratio") and left.get("warmup_steps"):
        draft.lose("warmup_ratio", "without effect there beside warmup_steps")
    if left.get("warmup_ratio") in (1, 1.0):
        draft.lose("warmup_ratio", "the whole run is warm-up, and a share is below 1 here: give warmup_steps")
    key = "warmup_ratio" if left.get("warmup_ratio") else "warmup_steps"
    share, up = left.get(key), math.floor if draft.library == "Axolotl" else math.ceil
    if isinstance(share, float) and 0 < share < 1:
        if _whole(steps):
            left.pop(key)
            left["warmup_steps"] = up(share * steps)
        else:
            draft.found["warmup_ratio"] = left.pop(key)
    elif draft.library == "Axolotl" and not {"warmup_steps", "warmup_ratio"} & {k for k in left if left[k] is not None}:
        if _whole(steps):
            draft.found["warmup_steps"] = min(steps * 3 // 100, 100)
            draft.comments["warmup_steps"] = "Axolotl's default: 3 % of the steps, at most 100"
        else:
            draft.found["warmup_ratio"] = 0.03
            draft.comments["warmup_ratio"] = "Axolotl's default: 3 % of the steps, there at most 100"
    for given in (left, draft.found) if draft.library == "Axolotl" else ():
        if given.get("warmup_steps") == 1:
            given["warmup_steps"] = 2  # as there


def schedule(draft: Draft) -> None:
    """Read the arguments of a schedule, and Axolotl's cosine that ends above 0."""
    left = draft.left
    kind = left.get("lr_scheduler_type") or left.get("lr_scheduler")
    if draft.library == "Axolotl" and left.get("cosine_min_lr_ratio") and kind in (None, "cosine"):
        left["lr_scheduler"] = "cosine_with_min_lr"
        if left["cosine_min_lr_ratio"] == 1:
            left["lr_scheduler"] = "constant"  # a cosine that falls to where it begins
            del left["cosine_min_lr_ratio"]
    key = next((key for key in ("lr_scheduler_kwargs", "lr_scheduler_args") if isinstance(left.get(key), dict)), None)
    if key is None:
        return
    own, rate = dict(left.pop(key)), _number(left.get("learning_rate"))
    found: dict[str, Any] = {}
    if kind == "cosine_with_min_lr" and "min_lr_rate" in own:
        found["min_lr_ratio"] = own.pop("min_lr_rate")
    if kind == "warmup_stable_decay":
        found |= {ours: own.pop(theirs) for theirs, ours in _WARMUP_STABLE_DECAY.items() if theirs in own}
    if kind == "polynomial" and "power" in own:
        found["power"] = own.pop("power")
    if kind == "cosine_with_restarts" and "num_cycles" in own:
        found["num_cycles"] = own.pop("num_cycles")
    name = {"cosine_with_min_lr": "min_lr", "polynomial": "lr_end"}.get(str(kind), "")
    end = _number(own.get(name))
    if rate and end is not None:
        del own[name]
        found["min_lr_ratio"] = end / rate
    left |= {name: value for name, value in found.items() if value is not None}
    if any(value is not None for value in own.values()):
        left[key] = own


_WARMUP_STABLE_DECAY = {"num_decay_steps": "decay_steps", "min_lr_ratio": "min_lr_ratio"}


def _number(value: Any) -> float | None:
    """Return a finite number as a float; None where a value is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _BEYOND
    return float(value) if number else None


_BEYOND = 2**1000
"""Above every number of a configuration, and within floats."""


def optimizer(draft: Draft) -> None:
    """Read APOLLO: a switch in LLaMA-Factory, `optim` with `optim_args` elsewhere."""
    left = draft.left
    key = next((key for key in ("optimizer", "optim") if left.get(key) in _APOLLO), None)
    chosen = left.pop("use_apollo", None) is True or key is not None
    given = _arguments(left.get("optim_args")) if key is not None else None
    own = {name: left.pop(name) for name in (*_OF_APOLLO, *APOLLO_SETTINGS) if name in left}
    if not chosen:
        return
    if given is not None:
        del left["optim_args"]
        own |= {_OF_ARGUMENTS.get(name, name): value for name, value in given.items()}
    own |= {"apollo_target": left.pop("optim_target_modules")} if "optim_target_modules" in left else {}
    if key is not None:
        del left[key]
    for name, value in own.items():
        known = value is None or value in _OF_APOLLO.get(name, (value,))
        if name in APOLLO_SETTINGS:
            left[name] = value
        elif not known or (name not in _OF_APOLLO):
            draft.lost.append(f"{name}: {value!r}: {_APOLLO_HAS}")
    left.pop("optim", None)
    left["optimizer"] = "apollo_mini" if own.get("apollo_scale_type") == "tensor" else "apollo"


_APOLLO = ("apollo_adamw", "apollo_adamw_layerwise")
_APOLLO_HAS = "optimizer=apollo has random projections of the smaller side of the matrices of all numbered layers"
APOLLO_SETTINGS = ("apollo_rank", "apollo_update_interval", "apollo_scale")
"""Keys of APOLLO that are settings here, by the same name."""
_OF_APOLLO: dict[str, tuple[object, ...]] = {
    "apollo_target": ("all", "all-linear", ["all"], ["all-linear"]),
    "apollo_proj": ("random",),
    "apollo_proj_type": ("std",),
    "apollo_scale_type": ("channel", "tensor"),
    "apollo_layerwise": (True, False),
    "apollo_scale_front": (True, False),
}
"""LLaMA-Factory's key → values that are ours too, or change no number."""
_OF_ARGUMENTS = {
    "rank": "apollo_rank",
    "update_proj_gap": "apollo_update_interval",
    "scale": "apollo_scale",
    "scale_type": "apollo_scale_type",
    "proj": "apollo_proj",
    "proj_type": "apollo_proj_type",
}
"""Key of transformers' `optim_args` → LLaMA-Factory's."""


def _arguments(text: Any) -> dict[str, Any] | None:
    """Read `optim_args`, a mapping or a text like `rank=64, scale=2`; None if it is neither."""
    if isinstance(text, dict):
        return {str(name): value for name, value in text.items()}
    pairs = [pair.split("=") for pair in text.replace(" ", "").split(",")] if isinstance(text, str) and text else []
    return {pair[0]: plain(pair[1]) for pair in pairs} if pairs and all(len(pair) == 2 for pair in pairs) else None


def dtype(draft: Draft) -> None:
    """Read the number format from switches; `auto` and what is off are left open."""
    left = draft.left
    flags = {key: left.pop(key) for key in _NUMBER_FORMATS if key in left}
    on = {key for key, value in flags.items() if value is True} | {str(value) for value in flags.values()}
    if on & {"bf16", "pure_bf16", "bfloat16"}:
        draft.found["dtype"] = "bfloat16"
        return
    draft.lost += [f"{key}: true: dtype is float32 or bfloat16" for key in ("fp16", "float16", "fp8") if key in on]
    off = flags.get("bf16") is False and draft.library != "LLaMA-Factory"  # which computes in the model's own dtype then
    if "float32" in on or (off and not on & {"fp16", "float16", "fp8"}):
        draft.found["dtype"] = "float32"


_NUMBER_FORMATS = "bf16 fp16 pure_bf16 bfloat16 float16 tf32 fp8 torch_dtype dtype".split()
