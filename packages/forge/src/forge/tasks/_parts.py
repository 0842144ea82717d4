"""Which parts of a model train → what is loaded so, what is adapted, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

import forge_accel
import forge_algos
import forge_dist
from forge._errors import SettingsError
from forge.tasks.items._items import VIRTUAL

if TYPE_CHECKING:
    from forge._progress import Reporter
    from forge.tasks._task import Task


def chosen_parts(s: Any) -> str:
    """Return the first setting, NAME=VALUE, by which other parts train than usual; "" for none."""
    usual = forge_algos.PartSettings()
    found = ((name, getattr(s.parts, name)) for name in attrs.asdict(usual))
    return next((f"{name}={value}" for name, value in found if value != getattr(usual, name)), "")


def check_parts(task: Task, s: Any) -> None:
    """Refuse parts that a verb's rows do not train, or an adapter does not.

    Raises:
        SettingsError: the setting, and what to do.
    """
    if not (chosen := chosen_parts(s)):
        return
    if not task.media:
        raise SettingsError(
            f"{chosen} has no effect with forge {task.name}: its rows are text, on which no tower computes. Leave it "
            "out, or take a verb whose rows may have images or audio."
        )
    adapter = s.adapter.adapter
    if adapter == "osft":
        raise SettingsError(
            f"{chosen} and adapter=osft, which bounds how far the language part's matrices move: what it makes of images and "
            "audio would follow tower and projector without a bound. Leave it out, or use adapter=lora."
        )
    if s.parts.beside and s.adapter.init_lora_weights == "eva":
        raise SettingsError(
            f"{chosen} and init_lora_weights=eva, which measures what layers are given of tokens, and a tower is given none: "
            "set another init_lora_weights, or leave it out."
        )
    if adapter in (*VIRTUAL, "ia3", "adapter_prompt"):
        raise SettingsError(
            f"{chosen} and adapter={adapter}, which is put into the language part alone: use adapter=lora or none, or leave it "
            "out."
        )


def check_any_media(s: Any, store: Any) -> None:
    """Raise SettingsError where parts are to train on media, and no training row has any."""
    if not (chosen := chosen_parts(s)):
        return
    kinds = getattr(store, "media_kinds", ())
    for part, wanted, what, other in (
        ("vision", ("image", "video"), "an image or a video", "audio"),
        ("audio", ("audio",), "audio", "vision"),
    ):
        if not getattr(s.parts, f"freeze_{part}_tower") and not {*wanted} & {*kinds}:
            others = f" Rows with {_MANY[kinds[0]]} train by freeze_{other}_tower=False." if kinds else ""
            raise SettingsError(
                f"freeze_{part}_tower=False: no row of data_path has {what}, so that the {part} tower would have nothing to "
                f"train on. Leave it out, or give rows with {_MANY[wanted[0]]}.{others}"
            )
    if not kinds:
        raise SettingsError(
            f"{chosen}: no row of data_path has an image, a video or audio, so that towers and projector would have nothing "
            "to train on. Leave it out, or give rows with some."
        )


_MANY = {"image": "images", "video": "videos", "audio": "audio"}


def loaded_parts(s: Any) -> tuple[str, ...]:
    """Return the parts whose own weights train, for `LoadRequest.trained`.

    An adapter's base is frozen as a whole later.
    """
    return s.parts.trained if s.adapter.adapter == "none" else ("language_model",)


def held_dtype(s: Any, path: str, computed: Any) -> Any:
    """Return the torch dtype in which the model that trains is held.

    Trained weights have one of their own, and a frozen base needs only that of the computation; with `qat` all of its digits.

    Args:
        s: settings of the run.
        path: of the model, or of the adapter's base.
        computed: torch dtype of the computation.

    """
    if s.adapter.adapter in ("none", "osft"):
        return getattr(forge_accel, s.device.weights)
    return computed if s.qat.qat is None or forge_dist.base_dtype(path) == computed else forge_accel.float32


def adapted_parts(s: Any, model: Any) -> dict[str, Any]:
    """Return the arguments of `forge_algos.adapt` that say for which parts of a model it is."""
    if not chosen_parts(s):
        return {}
    found = forge_dist.media_parts(model, s.parts.beside)
    return {"language": not s.parts.freeze_language_model, "beside": [name for names in found.values() for name in names]}


def freeze_unreached(
    s: Any,
    model: Any,
    media: Sequence[forge_algos.MediaDocument],
    unreached: Callable[[forge_algos.MediaDocument], Sequence[str]],
) -> Sequence[str]:
    """Freeze trained weights that no image or clip reaches, and return their names; collective.

    LLaVA reads a layer before the last one, and a pooling head is of no use here. Such weights would only decay.
    """
    if s.adapter.adapter != "none" or not s.parts.beside or not media:
        return ()
    first, *others = map(unreached, media)
    names = [name for name in first if all(name in other for other in others)]
    for name in names:
        model.get_parameter(name).requires_grad = False
    return names


def report_parts(s: Any, model: Any, report: Reporter) -> None:
    """Log how much trains of each part of an adapted model; errors as `check_trained`."""
    moving = check_trained(s, model)
    if chosen_parts(s):
        numbers = {part: sum(p.numel() for p in weights) for part, weights in moving.items()}
        said = ", ".join(f"{part} {number:,}" for part, number in numbers.items())
        report.note(f"parts: weights that train: {said}", event="parts", weights=numbers)


def check_trained(s: Any, model: Any) -> dict[str, list[Any]]:
    """Return part → its weights that train, of a model with its adapter.

    Raises:
        SettingsError: a part that is to train has no weight that does, or the adapter of adapter_path has some of a frozen one.
    """
    chosen, bare = chosen_parts(s), model.get_base_model() if hasattr(model, "peft_config") else model
    if not forge_dist.is_multimodal(bare.config) or not (chosen or s.adapter.adapter_path):
        return {}
    try:
        parts = _parts_of(bare)
    except forge_dist.ModelError:
        if chosen:
            raise
        return {}  # nobody asked for parts that this model does not name
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    moving = {part: [p for p in weights if id(p) in trained] for part, weights in parts.items()}
    for part, weights in moving.items():
        setting, frozen = f"freeze_{part}", getattr(s.parts, f"freeze_{part}")
        # Inkling has no projector beside its tower.
        if not frozen and not weights and parts[part] and part != "language_model":
            raise SettingsError(f"{setting}=False: nothing of it would train: {_why_none(s, part)}.")
        if frozen and weights and s.adapter.adapter_path:
            raise SettingsError(f"the adapter in adapter_path has weights of what {setting}=True freezes: set {setting}=False.")
    return moving


def _why_none(s: Any, part: str) -> str:
    if s.adapter.adapter_path:
        return f"the adapter in adapter_path has no layer of it. Leave freeze_{part} out"
    given = "target_modules" if s.adapter.adapter != "none" else "unfrozen_parameters"
    if getattr(s.adapter, given) is not None:
        return f"{given} names nothing of it. Name some of it too, or leave freeze_{part} out"
    if s.adapter.adapter == "none":
        return f"no image, clip or video of the rows reaches it. Leave freeze_{part} out"
    return (
        f"adapter={s.adapter.adapter} is put into linear layers, and it has none (Gemma 3's projector is a bare matrix). Use "
        f"adapter=none, or name its module in modules_to_save, which trains it whole"
    )


def _parts_of(bare: Any) -> dict[str, list[Any]]:
    """Return towers, projector and language part → their weights.

    The layer of a classifier is of none: it trains whichever do.
    """
    named = dict(bare.named_parameters())
    outer = {part: tuple(names) for part, names in forge_dist.media_parts(bare).items()}
    found = {
        part: [p for name, p in named.items() if name in names or name.startswith(tuple(f"{each}." for each in names))]
        for part, names in outer.items()
    }
    held = {id(p) for weights in found.values() for p in weights}
    held |= {id(p) for name, p in named.items() if name.startswith("score.")}
    return {"language_model": [p for p in named.values() if id(p) not in held], **found}
