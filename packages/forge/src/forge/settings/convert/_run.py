"""Batch, length, schedule, dtypes, adapter and sharding of another library's file → ours."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from forge.settings.convert._draft import LORA, TUNERS, Draft, plain
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
    own = {name: left.pop(name) for name in (*_OF_APOLLO, *_AS_HERE) if name in left}
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
        if name in _AS_HERE:
            left[name] = value
        elif not known or (name not in _OF_APOLLO):
            draft.lost.append(f"{name}: {value!r}: {_APOLLO_HAS}")
    left.pop("optim", None)
    left["optimizer"] = "apollo_mini" if own.get("apollo_scale_type") == "tensor" else "apollo"


_APOLLO = ("apollo_adamw", "apollo_adamw_layerwise")
_APOLLO_HAS = "optimizer=apollo has random projections of the smaller side of the matrices of all numbered layers"
_AS_HERE = ("apollo_rank", "apollo_update_interval", "apollo_scale")
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


def adapter(draft: Draft) -> None:
    """Read which weights are trained; LLaMA-Factory trains LoRA unless it is told otherwise."""
    left, lost = draft.left, draft.lost
    kind = left.pop("adapter", None) or left.pop("finetuning_type", None)
    if kind is None and draft.library == "LLaMA-Factory":
        kind = "lora"
        draft.comments["adapter"] = "LLaMA-Factory's default"
    if left.pop("use_peft", False) is True:
        kind = "lora"
    kind = {"full": "none", None: "none"}.get(kind, kind)
    for key in ("use_dora", "peft_use_dora", "use_rslora", "peft_use_rslora"):
        if left.pop(key, False) is True:
            kind = "dora" if "dora" in key else "rslora"
    kind = _quantized(draft, kind)
    _dropout(draft)
    for key in ("add_tokens", "add_special_tokens"):
        if draft.library == "LLaMA-Factory" and isinstance(left.get(key), str):
            left[key] = [token.strip() for token in left[key].split(",")]
    if kind == "none":
        for key in [key for key in left if key.startswith("lora_") or key == "peft_layers_to_transform"]:
            del left[key]
    _of_others(draft, kind)
    _targets(draft)
    if left.get("unfrozen_parameters") and kind != "none":
        draft.lose("unfrozen_parameters", "beside an adapter it alone trains; modules_to_save trains other modules whole")
    for pattern in left.get("unfrozen_parameters") or ():
        if str(pattern)[-1:].isdigit():
            lost.append(f"unfrozen_parameters: {pattern}: one layer here; in Axolotl also those whose number begins so")
    if kind == "freeze":
        _layers(draft)
        kind = "none"
    if kind not in ("none", *LORA, *TUNERS):
        lost.append(f"{kind}: forge has no such way of training: choose adapter")
        kind = "none"
    if kind != "none":
        draft.found["adapter"] = kind
    _parts(draft, kind)
    _stored(draft, kind)
    if kind != "none" or draft.verb == "osft":
        _without_apollo(draft)


def _of_others(draft: Draft, kind: object) -> None:
    """Leave out settings of an adapter that does not train; there too they have no effect."""
    left = draft.left
    own = {"oft": ("oft_", "module_dropout"), "vera": ("vera_",), "fourierft": ("fourier_",)}
    trains = "oft" if kind == "qoft" else kind
    others = tuple(prefix for name, prefixes in own.items() if name != trains for prefix in prefixes)
    others += ("lora_",) if kind in TUNERS else ()
    for key in [key for key in left if key.startswith(others)]:
        del left[key]
    if trains == "oft":
        if left.pop("oft_rank", 0):
            draft.lost.append("oft_rank: blocks of a layer there; here oft_block_size is the inputs of each, for every layer")
        if left.get("oft_block_size") == 0:
            del left["oft_block_size"]
        if not left.get("module_dropout"):
            left.pop("module_dropout", None)


def _layers(draft: Draft) -> None:
    """Read which layers train under LLaMA-Factory's `freeze`: by default the last two."""
    left = draft.left
    number, modules = left.pop("freeze_trainable_layers", None), left.pop("freeze_trainable_modules", None)
    if number is None:
        number = 2
        draft.comments["unfrozen_parameters"] = "LLaMA-Factory's default: the last 2 layers"
    if not isinstance(number, int) or isinstance(number, bool) or not number:
        draft.lost.append(f"freeze_trainable_layers: {number!r}: name the weights that train in unfrozen_parameters")
        return
    end = f"last:{number}" if number > 0 else f"first:{-number}"
    names = [name.strip() for name in str(modules or "all").split(",")]
    draft.found["unfrozen_parameters"] = tuple(end if name == "all" else f"{end}.{name}" for name in names)


_WITH_MEDIA = ("sft", "osft", "distill", "dpo", "orpo", "simpo", "kto", "reward", "grpo", "rloo", "ppo")


def _parts(draft: Draft, kind: object) -> None:
    """Read which parts of a model with images train; all do in Axolotl without an adapter."""
    left = draft.left
    frozen = left.get("freeze_mm_modules")
    if draft.library == "Axolotl" and frozen in (True, False, None):
        left.pop("freeze_mm_modules", None)
        if left.get("processor_type") and not frozen and kind == "none" and draft.verb in _WITH_MEDIA:
            for name in ("freeze_vision_tower", "freeze_multi_modal_projector"):
                draft.found[name] = False
                draft.comments[name] = "every part trains there; leave it out for rows of text alone"
            draft.comments["freeze_vision_tower"] += ", and for rows with audio take freeze_audio_tower=false"
    for key in [key for key in _PARTS if key in left]:
        trains = left[key] is not _PARTS[key]
        if trains and key in ("freeze_vision_tower", "freeze_vit"):
            draft.comments["freeze_vision_tower"] = "the audio tower too there: freeze_audio_tower=false, on rows with audio"
        if trains and draft.verb not in _WITH_MEDIA:
            draft.lose(key, f"forge {draft.verb} trains on text")
        elif trains and kind != "none" and "projector" in key and draft.library == "LLaMA-Factory":
            draft.lose(key, "LoRA has no layers in the projector there; set it to give it some")


_PARTS = {
    **dict.fromkeys(("freeze_vision_tower", "freeze_vit", "freeze_multi_modal_projector", "freeze_aligner"), True),
    **dict.fromkeys(("freeze_language_model", "freeze_llm"), False),
}
"""Key → its value where the part is as it is left out."""


def _without_apollo(draft: Draft) -> None:
    """Leave APOLLO out beside an adapter, which another optimizer trains here."""
    if draft.left.get("optimizer") not in ("apollo", "apollo_mini"):
        return
    for name in _AS_HERE:
        draft.left.pop(name, None)
    there = "is refused beside LoRA there" if draft.library == "LLaMA-Factory" else "moves the adapter's matrices there"
    draft.lose("optimizer", f"{there}; here it moves the model's own matrices alone, and AdamW trains an adapter")


def _quantized(draft: Draft, kind: Any) -> Any:
    """Read in how many bits the base is held; return the adapter beside it."""
    left, lost = draft.left, draft.lost
    asked = [bits for bits in (4, 8) if left.pop(f"load_in_{bits}bit", False) is True]
    if left.get("quantization_bit") in (4, 8):
        asked.append(left.pop("quantization_bit"))
    if not asked:
        return kind
    if kind not in ("lora", "qlora", "oft"):
        lost.append(f"load_in_{asked[0]}bit: true: a base in {asked[0]} bits is adapter=qlora, and this trains {kind}")
        return kind
    if asked == [8]:
        draft.found["quant_type"] = "int8"
        unread = [key for key in sorted(_OF_4_BITS & left.keys()) if left.pop(key) not in (None, False)]
        lost += [f"{key}: is of 4 bits, and these are 8" for key in unread]
    return "qoft" if kind == "oft" else "qlora"


_OF_4_BITS = set(
    """bnb_4bit_quant_type quantization_type bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant
    bnb_4bit_compute_dtype""".split()
)

_SHAPE = ("lora_r lora_rank lora_alpha lora_target lora_target_modules lora_modules_to_save additional_target").split()


def _stored(draft: Draft, kind: object) -> None:
    """Read the adapter to go on from, whose rank, scale and layers are its own."""
    left = draft.left
    key = next((name for name in ("adapter_name_or_path", "lora_model_dir") if left.get(name)), None)
    anew = left.pop("create_new_adapter", False) is True
    if key is None:
        return
    if isinstance(left[key], list) and len(left[key]) == 1:
        left[key] = left[key][0]
    if kind == "none" or anew or not isinstance(left[key], str) or "," in left[key]:
        draft.lose(
            key, "it is merged there before training: forge export --merge does so, and gives the model_path of this run"
        )
        return
    draft.found["adapter_path"] = left.pop(key)
    for name in _SHAPE:
        if left.get(name):
            draft.lose(name, "without effect there: the adapter of adapter_path has its own")
    if draft.library == "LLaMA-Factory" and draft.verb in ("dpo", "kto") and not left.get("ref_model"):
        draft.found["reference"] = "adapter_off"
        draft.comments["reference"] = "LLaMA-Factory's: the base, not the model that adapter_path makes of it"


WITHOUT_DROPOUT = {
    "TRL": ("dpo", "kto", "reward", "orpo", "simpo"),
    "Axolotl": ("dpo", "kto", "reward", "orpo", "simpo"),
    "LLaMA-Factory": ("dpo", "kto", "orpo", "simpo"),
    "ms-swift": ("dpo", "kto", "reward", "orpo", "simpo", "distill", "ppo"),
}
"""Library → verbs whose trainer switches all dropout off, that of LoRA too, unless it is told otherwise."""


def _dropout(draft: Draft) -> None:
    """Leave LoRA's dropout out where it does nothing there."""
    left, off = draft.left, draft.left.pop("disable_dropout", None)
    if off is None:
        off = draft.verb in WITHOUT_DROPOUT[draft.library]
    if off is True:
        if left.get("lora_dropout"):
            draft.lose("lora_dropout", f"without effect there: {draft.library} switches dropout off in {draft.verb}")
        draft.found["lora_dropout"] = None  # so that no default of the other library takes its place


def _experts(left: dict[str, Any], *, every: bool) -> None:
    """Read the expert matrices that get an adapter, which are targets like any other here."""
    experts, named = left.get("lora_target_parameters"), left.get("lora_target_modules")
    named = [named] if isinstance(named, str) else named
    if isinstance(experts, list) and all(isinstance(name, str) for name in experts) and (every or named):
        del left["lora_target_parameters"]
        if isinstance(named, list):
            left["lora_target_modules"] = [*named, *experts]


def _targets(draft: Draft) -> None:
    """Read the layers that get an adapter (by default all linear ones), and others trained."""
    left = draft.left
    every = left.pop("lora_target_linear", None) is True
    named = left.get("lora_target_modules")
    if every and isinstance(named, list) and all(str(name).endswith("_proj") for name in named):
        del left["lora_target_modules"]  # linear layers, which are in anyway
    elif every and named and named not in ("all-linear", ["all-linear"]):
        draft.lose("lora_target_modules", "every linear layer gets an adapter; for others give modules_to_save")
    kinds = ("lora_target", "oft_target", "lora_target_modules", "target_modules")
    if any(left.get(key) in ("all", "all-linear", ["all-linear"]) for key in kinds):
        every = True
        for key in kinds:
            left.pop(key, None)
    if every:
        draft.found["target_modules"] = None  # so that no default of the other library takes its place
    for key in ("lora_target_modules", "lora_target", "oft_target"):
        pattern = left.get(key)
        if isinstance(pattern, str) and re.search(r"[\\(|+^$]|\.\*", pattern):
            if key != "lora_target_modules":
                draft.lose(
                    key, "parts of names there too, in a list, so that a regular expression fits none: re: begins one here"
                )
                draft.found["target_modules"] = None
            else:
                left[key] = [f"re:{pattern}"]  # of whole names, as in PEFT
    _experts(left, every=every)
    for key in ("lora_target", "oft_target", "additional_target"):
        if isinstance(left.get(key), str):
            left[key] = [name.strip() for name in left[key].split(",")]
