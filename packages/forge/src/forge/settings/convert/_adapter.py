"""Which weights train in another library's file: adapter, layers, parts → ours."""

from __future__ import annotations

import re
from typing import Any

from forge.settings.convert._draft import LORA, TUNERS, Draft
from forge.settings.convert._run import APOLLO_SETTINGS


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
    for name in APOLLO_SETTINGS:
        draft.left.pop(name, None)
    there = "is refused beside LoRA there" if draft.library == "LLaMA-Factory" else "moves the adapter's matrices there"
    draft.lose("optimizer", f"{there}; here it moves the model's own matrices alone, and AdamW trains an adapter")


def _quantized(draft: Draft, kind: Any) -> Any:
    """Read in how many bits the base is held; return the adapter beside it."""
    left, lost = draft.left, draft.lost
    if isinstance(left.get("qat"), dict):
        draft.lose("qat", _QAT)
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


_QAT = (
    "its steps round to torchao's types, for files of torchao; here to a type of GGUF files, with adapter=none, lora, rslora "
    "or dora: qat=q4_0 has 4 bits and a scale for 32 numbers of a row, qat=q8_0 has 8, the embedding is rounded too, and so is "
    "the first step"
)
_OF_4_BITS = set(
    """bnb_4bit_quant_type quantization_type bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant
    bnb_4bit_compute_dtype""".split()
)

_SHAPE = (
    "lora_r lora_rank lora_alpha lora_target lora_target_modules lora_modules_to_save additional_target oft_target "
    "oft_block_size vera_rank fourier_n_frequency fourier_scaling pissa_init peft_init_lora_weights"
).split()


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
