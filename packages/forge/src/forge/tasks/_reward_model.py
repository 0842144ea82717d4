"""Reward model of a run → a reward function, which sees the images of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import forge_algos
import forge_data
import forge_dist
from forge._errors import SettingsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge.tasks._task import Run

_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
_PLACE = "a prompt with its completion"


def check_reward_media(path: str) -> None:
    """Refuse a reward model without a processor of images.

    Raises:
        SettingsError: why there is none, and what to do.
    """
    try:
        _media_inputs(path, None)
    except forge_data.TokenizerError as error:
        raise SettingsError(
            f"reward_model_path {path} and prompts with images: {error}. Take a reward model that sees images, such as one "
            "that forge reward trained on pairs with images, or reward completions by functions (reward)."
        ) from error


def reward_model(run: Run, path: str) -> forge_algos.online.RewardModel:
    """Load a reward model, whole on each rank, since ranks score different completions."""
    dtype, media = run.machine.dtype(run.settings.device.dtype).value, getattr(run.train, "media", None) is not None
    model: Any = forge_dist.load_trained(
        path,
        dtype=dtype,
        device=run.device,
        task="reward",
        other_dtype=dtype if media and dtype.itemsize == 4 else None,
    )
    run.others.add(model)
    forge_algos.keep_documents_apart(model, device=run.device)
    tokenizer = forge_data.load_tokenizer(path)
    pictured = None
    if media:
        pictured = _Conversations(tokenizer, _media_inputs(path, tokenizer))
        _check_sees(run, model, path, pictured)
    return forge_algos.online.RewardModel(
        model,
        tokenizer=tokenizer,
        device=run.device,
        max_tokens=run.settings.plan.max_tokens_per_gpu,
        max_positions=forge_dist.position_table(model),
        autocast=run.autocast,
        pictured=pictured,
    )


class _Conversations:
    """Conversations with images → a forward's arguments, by the reward model's processor."""

    def __init__(self, tokenizer: Any, inputs: forge_data.MediaInputs) -> None:
        self._tokenizer, self.inputs = tokenizer, inputs

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]] | None:
        contents = [message.get("content") for message in messages]
        if not any(part.get("type") != "text" for each in contents if isinstance(each, list) for part in each):
            return None
        # Without a directory: the paths of a store are absolute.
        asked, media = forge_data.messages_with_media({"messages": list(messages)}, "messages", place=_PLACE)
        text = str(self._tokenizer.apply_chat_template(asked, tokenize=False))
        return self.inputs.prompt(text, media, _PLACE)


def _media_inputs(path: str, tokenizer: Any) -> forge_data.MediaInputs:
    """Return the processor of a reward model; of an adapter without one, of its base."""
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file() and not any((folder / name).is_file() for name in _PROCESSOR):
        path = forge_dist.adapter_base(folder).path
    return forge_data.MediaInputs(path, tokenizer=tokenizer)


def _check_sees(run: Run, model: Any, path: str, pictured: _Conversations) -> None:
    """Refuse a reward model that passes over images, on a prompt that has some.

    Raises:
        SettingsError: it does, or cannot read the prompt.
    """
    items = next(each for each in (run.train, run.held_out) if each is not None and each.store.has_media)
    row = int(items.store.media_counts[:, 0].nonzero()[0][0])
    try:
        made = pictured([*items.store[row].prompt, {"role": "assistant", "content": "yes"}])
        assert made is not None
        ids = made.pop("input_ids")[0].astype(np.int32)
        document = forge_algos.MediaDocument(ids, made, pictured.inputs.spans(ids))
        forge_algos.require_media(model, document, device=run.device, autocast=run.autocast)
    except (forge_algos.PackedBatchError, forge_data.DataError, forge_data.TokenizerError) as error:
        raise SettingsError(
            f"reward_model_path {path} cannot be given the images of {items.source(row)}: {error}. Take a reward model that "
            "sees images, or reward completions by functions (reward)."
        ) from error
