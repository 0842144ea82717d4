"""Models of several modalities: which of their parts train, and how the others are kept.

Such a directory holds a vision tower, a projector, perhaps audio layers beside a language model. A forward on text alone does
not run them. What is frozen is kept in the dtype of its files.
"""

import inspect
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import expand_user, is_hub_name
from forge_dist.loading._unwrap import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files by which transformers makes a processor: a tokenizer beside what turns images and sounds into tensors."""


_TOWERS = {"vision_tower": "image", "audio_tower": "audio"}
"""Part → transformers' name of its modality."""
_SAID = {"vision_tower": "vision tower", "audio_tower": "audio tower"}
_PROJECTOR_PART = "multi_modal_projector"
_PROJECTOR = re.compile(r"merger|connector|projector|^proj\d*$")
"""In names of projectors that stand in a tower, or that are models of their own."""
_MARKS = "mm_token_type_ids"
"""Argument of a forward: 1 for each token that stands for a part of an image, 0 for one of text."""
_PREFIX = "token_type_ids"
"""Argument of a forward of PaliGemma: 0 for each token of a prompt, which all see each other, 1 for one of a completion."""
_SCORE = "score"
"""transformers' name of the layer of a sequence classifier."""
LANGUAGE = ("language_model",)
"""The parts that train where nothing else is said."""


def is_multimodal(config: "PreTrainedConfig") -> bool:
    """Return whether a configuration holds that of a language model beside others."""
    return config.get_text_config() is not config


def other_modalities(model: "PreTrainedModel") -> dict[str, nn.Parameter]:
    """Return name → parameter outside of the language part: decoder, embeddings, head.

    Under all of its names; empty for a model of text alone.
    """
    if not is_multimodal(model.config):
        return {}
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, "score", None))
    language = {id(parameter) for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if id(parameter) not in language}


def modules_beside_language(model: "PreTrainedModel") -> list[str]:
    """Return names of the outermost modules that hold weights, none of the language part."""
    others, found = set(other_modalities(model)), list[str]()
    for name, module in model.named_modules() if others else ():
        own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if own and others.issuperset(own) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def passed_over(model: "PreTrainedModel") -> list[str]:
    """Return names of the outermost modules that a row without images does not run.

    They stand beside the language part, or are layers of it that attend to images alone (Mllama's cross-attention).
    """
    numbers = getattr(model.config.get_text_config(), "cross_attention_layers", None) or ()
    decoder: Any = model.get_decoder() if numbers else None
    layers = {decoder.layers[number] for number in numbers}
    return [*modules_beside_language(model), *(name for name, module in model.named_modules() if module in layers)]


def media_parts(model: "PreTrainedModel", parts: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return part → names of the outermost modules and parameters that it consists of.

    Towers are transformers' encoders of images and of audio (`get_encoder`); in a model of one other modality that names none
    so, its only encoder beside the language part (Granite Speech). The projector is what else stands beside the language part,
    or, in a model that names no tower, what has its name (VibeVoice-ASR); where nothing does, the layers of its name in the
    towers (Qwen-VL's `merger` and `deepstack_merger_list`, Qwen-Omni's `proj` of audio), which write vectors of the language
    part's width.

    Args:
        model: bare, as transformers loads it.
        parts: any of vision_tower, audio_tower and multi_modal_projector; if a tower and the projector are asked for, they need
            not be told apart. None: those that there are.

    Raises:
        ModelError: the model has no such part, or it cannot be told which of its layers it is.
    """
    from transformers import PreTrainedModel

    kind, multimodal = type(model).__name__, is_multimodal(model.config)
    names = {module: name for name, module in model.named_modules()}
    outermost = modules_beside_language(model) if multimodal else []
    # Some are None in a directory without such a part (Gemma 4's tower of audio), or the model itself.
    encoders: dict[str, Any] = {part: model.get_encoder(modality=kind_of) for part, kind_of in _TOWERS.items()}
    towers = {part: module for part, module in encoders.items() if names.get(module) in outermost}
    if not towers and names.get(only := model.get_encoder()) in outermost:
        towers = dict.fromkeys(_parts_with_modality(model), only)
        towers = towers if len(towers) == 1 else {}
    projector = [name for name in outermost if _PROJECTOR.search(name.rpartition(".")[2])]
    if not towers and projector and set(parts or [_PROJECTOR_PART]) == {_PROJECTOR_PART}:
        return {_PROJECTOR_PART: projector}
    wanted = (*towers, _PROJECTOR_PART) if parts is None and towers else [*(parts or _TOWERS)]
    for part in [part for part in _TOWERS if part in wanted and part not in towers] if towers else wanted[:1]:
        what = _SAID.get(part, "vision tower or audio tower")
        raise ModelError(f"{kind} names no {what} (get_encoder): it cannot be said which of its layers are one")
    within = tuple(f"{name}." for name in outermost)
    loose = sorted(name for name in other_modalities(model) if not name.startswith(within))
    known = {names[tower] for tower in towers.values()}
    beside = [name for name in (*outermost, *loose) if name not in known]
    models = {name for module, name in names.items() if isinstance(module, PreTrainedModel)}
    alike = [name for name in beside if name in models and not _PROJECTOR.search(name)]
    found: dict[str, list[str]] = {part: [names[tower]] for part, tower in towers.items()}
    found[_PROJECTOR_PART] = beside
    for part, tower in towers.items() if not beside else ():
        own = [name for name, _ in tower.named_children()] + [name for name, _ in tower.named_parameters(recurse=False)]
        found[part] = [f"{names[tower]}.{name}" for name in own if not _PROJECTOR.search(name)]
        found[_PROJECTOR_PART] += [f"{names[tower]}.{name}" for name in own if _PROJECTOR.search(name)]
    if (alike or not found[_PROJECTOR_PART]) and (_PROJECTOR_PART not in wanted or set(wanted).isdisjoint(towers)):
        why = f"{alike[0]} may be either" if alike else f"{' and '.join(sorted(known))} has no layer of its name"
        raise ModelError(
            f"{kind}: {' and '.join(_SAID[part] for part in towers)} and projector cannot be told apart ({why}): train both, "
            "or name the weights that train in unfrozen_parameters as well"
        )
    return {part: found[part] for part in found if part in wanted}


def _parts_with_modality(model: "PreTrainedModel") -> list[str]:
    """Return the towers whose modality a model says that it takes."""
    said = model.input_modalities
    taken = {said} if isinstance(said, str) else {*said}
    return [part for part, modality in _TOWERS.items() if modality in taken]


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a parameter or module is one of these, or within one of these modules."""
    return any(name == outer or name.startswith(f"{outer}.") for outer in modules)


def language_dtype(model: "PreTrainedModel") -> torch.dtype:
    """Return the dtype of the language part; of a model of text alone, of the model."""
    if not is_multimodal(model.config):
        return model.dtype
    decoder: Any = model.get_decoder()
    return next(parameter.dtype for parameter in decoder.parameters() if parameter.is_floating_point())


def freeze_parts(model: "PreTrainedModel", stored: torch.dtype, where: str, trained: Collection[str] = LANGUAGE) -> None:
    """Freeze all parts but the `trained` ones, and keep them as narrow as `stored`.

    The layer of a reward model or a classifier trains whichever do: it may be new.

    Args:
        model: as it was read, divided or not; before its first forward.
        stored: dtype of the directory's weights, or another in which the rest is to compute.
        where: the model_path, for errors.
        trained: any of language_model, vision_tower, audio_tower, multi_modal_projector.

    Raises:
        ModelError: the model names no language part: a decoder and a head over the vocabulary; or not the other part that is to
            train.
    """
    beside = [part for part in trained if part not in LANGUAGE]
    if not is_multimodal(model.config):
        if beside:
            raise ModelError(f"model_path {where}: {type(model).__name__} is a model of text alone, without {beside[0]}")
        return
    headless = model.base_model is model and model.get_output_embeddings() is None
    if model.get_decoder() is model or not (headless or hasattr(model, "score") or model.get_output_embeddings() is not None):
        raise ModelError(f"model_path {where}: {type(model).__name__} names no decoder and head that could be trained on text")
    others = other_modalities(model)
    try:
        moving = [name for names in media_parts(model, beside).values() for name in names] if beside else []
    except ModelError as error:
        raise ModelError(f"model_path {where}: {error}") from None
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (is_inside(name, moving) if name in others else LANGUAGE[0] in trained) or is_inside(name, [_SCORE]):
            continue
        parameter.requires_grad = False
        # ZeRO-3 keeps its partitions in one dtype.
        if parameter.is_floating_point() and parameter.dtype.itemsize > stored.itemsize and not is_partitioned(parameter):
            narrow = replaced.setdefault(id(parameter), nn.Parameter(parameter.detach().to(stored), requires_grad=False))
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, narrow)


def mark_text(model: "PreTrainedModel") -> None:
    """Mark text as text for a model that computes it otherwise without.

    Molmo 2 of transformers 5.23 and 5.24 refuses to train without `mm_token_type_ids` of 0, which its processor gives with
    every text. PaliGemma without `token_type_ids` has no mask under sdpa, and its layers are not causal, so that a token sees
    those ahead; 1 is what its processor gives of a completion. A forward with a cache is left as it is.
    """
    body: Any = model.base_model
    if (marks := _marks_of(model, body)) is None:
        return
    mark, number = marks

    def marked(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"][..., 0]
        if tokens is None or any(given.get(name) is not None for name in (mark, "cache", "past_key_values")):
            return args, given
        return args, given | {mark: torch.full_like(tokens, number, dtype=torch.int64)}

    body.register_forward_pre_hook(marked, with_kwargs=True)


def _marks_of(model: "PreTrainedModel", body: Any) -> tuple[str, int] | None:
    """Return the argument that marks tokens, and the number of text; None: it needs none."""
    text = model.config.get_text_config()
    ahead = is_multimodal(model.config) and getattr(text, "use_bidirectional_attention", None) is True
    if ahead and _PREFIX in inspect.signature(body.forward).parameters:
        return _PREFIX, 1
    return (_MARKS, 0) if _wants_marks(body) else None


class _Began(Exception):  # noqa: N818 - no error: the forward got as far as its embeddings
    pass


def _wants_marks(body: Any) -> bool:
    """Return whether a training forward of text is refused for want of `mm_token_type_ids`."""
    if _MARKS not in inspect.signature(body.forward).parameters:
        return False
    ids, modes = torch.zeros(1, 1, dtype=torch.int64), {module: module.training for module in body.modules()}

    def begin(*_: Any) -> None:
        raise _Began

    def begins(**marks: torch.Tensor) -> bool:
        try:
            body.forward(input_ids=ids, use_cache=False, **marks)
        except _Began:
            return True
        except ValueError:
            return False
        except Exception:  # noqa: BLE001 - whatever else a forward may raise on meta tensors or shards says nothing of marks
            return True
        return True

    # Before hooks that gather a divided layer's weights, which only its forward would divide again.
    hook = body.get_input_embeddings().register_forward_pre_hook(begin, prepend=True)
    try:
        body.train()
        return not begins() and begins(**{_MARKS: ids})
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training


def attend_plainly(model: "PreTrainedModel") -> None:
    """Give the parts beside the language an attention of transformers.

    Ours is causal, and theirs sees a whole image.
    """
    text = model.config.get_text_config()
    others = [name for name in model.config.sub_configs if getattr(model.config, name, None) not in (None, text)]
    for name in others:
        for attention in ("sdpa", "eager"):
            try:
                model.set_attn_implementation({name: attention})
            except ValueError:  # this part has none of that kind
                continue
            break


def processor_files(model_path: str, *, fetch: bool = False) -> list[Path]:
    """Return the processor files of a directory, or of a hub name: those in its cache.

    With `fetch` they are downloaded, so that they are there when the network is not.
    """
    if not is_hub_name(model_path):
        folder = Path(expand_user(model_path))
        return [file for name in PROCESSOR_FILES if (file := folder / name).is_file()]
    from transformers.utils import cached_file

    found = []
    for name in PROCESSOR_FILES:
        try:
            file = cached_file(model_path, name, local_files_only=not fetch)
        except (OSError, ValueError):
            continue  # most models have some of them
        found += [] if file is None else [Path(file)]
    return found
