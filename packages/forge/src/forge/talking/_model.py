"""Path of a run or a model → a model that answers conversations, as it was trained to."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._content import content_text, media_places
from forge._counted import counted
from forge._errors import SettingsError
from forge._near import near
from forge._printable import printable
from forge._progress import Reporter
from forge._redact import is_hub_form
from forge._turn_end import stop_at_turn_end, trained_turn_end
from forge.saving._directories import last_export, run_values
from forge.saving._system_prompt import run_system_prompt
from forge.talking._rounded import load_rounded, rounding_of
from forge.talking._stops import BeforeStop, about_nothing, end_of, until_stop
from forge.tasks._system_message import shared_system

_SWITCH = "enable_thinking"
Kind = Literal["image", "video", "audio"]
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@attrs.frozen(kw_only=True)
class Sampling:
    """How an answer is drawn."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 always takes the likeliest token."""
    stop: Sequence[str] = ()
    """Texts at which an answer ends; they are not part of it."""

    def __attrs_post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        if self.temperature and not 1e-3 <= self.temperature < float("inf"):
            raise SettingsError(
                f"temperature must be 0 (always the likeliest token) or at least 0.001, not {self.temperature}."
            )
        if not all(self.stop):
            raise SettingsError("stop: an empty text would end every answer before it begins. Leave it out.")


def find_model(model_path: str | Path) -> str:
    """Return the directory of a run's last export, or of a model or an adapter, or a hub name.

    Answers before torch is imported.

    Raises:
        SettingsError: there is none, or it writes no text.
        forge_dist.ModelError: the hub cannot be asked for that name, or has no such model.

    """
    directory = last_export(str(model_path))
    if not os.path.isdir(os.path.expanduser(directory)):
        if os.path.exists(os.path.expanduser(directory)) or not is_hub_form(directory):
            found = "is a file" if os.path.exists(os.path.expanduser(directory)) else "there is no such directory"
            if found == "is a file" and directory.lower().endswith(".gguf"):
                found = f"is a GGUF file, which llama.cpp reads: `llama-cli -m {shlex.quote(directory)}`"
            raise SettingsError(
                f"{directory}: {found}.{near(Path(directory).expanduser())} Give a run, a directory of a model or an adapter, "
                "or a name on the Hub (org/name)."
            )
        forge_dist.check_hub_name(directory)
    elif not any((Path(directory).expanduser() / name).exists() for name in ("config.json", "adapter_config.json")):
        raise SettingsError(
            f"{directory} is neither a run nor a model: it has no config.yaml, config.json or adapter_config.json."
            f"{near(Path(directory).expanduser())} Give a run, or a directory of a model or an adapter."
        )
    for name, key in (("config.json", "architectures"), ("adapter_config.json", "task_type")):
        found = _read(Path(directory).expanduser() / name).get(key)
        if found == "SEQ_CLS" or (isinstance(found, list) and any("SequenceClassification" in str(one) for one in found)):
            raise SettingsError(
                f"{directory} is a reward model or a classifier: it gives texts numbers and writes none. Give a language model."
            )
        named = found if isinstance(found, list) else []
        if found == "FEATURE_EXTRACTION" or any(re.search(r"(?<!Head)(?<!Heads)Model$", str(one)) for one in named):
            raise SettingsError(f"{directory} has no head: it embeds texts and writes none. Give a language model.")
    return directory


_FORMS: dict[Kind, str] = {
    "image": "a PNG, JPEG or WebP",
    "video": "an MP4, MOV, WebM or MKV",
    "audio": "a WAV, FLAC, Ogg or MP3",
}


def check_medium(path: str, kind: Kind) -> forge_data.Media:
    """Return a medium of a file of this machine.

    Raises:
        SettingsError: it is none, saying what it is.

    """
    remedy = f"{_FORMS[kind]} file"
    if path[:5].lower() == "data:":
        raise SettingsError(f"{kind} {path[:40]}…: is a data: URI. Give the path of {remedy}.")
    file = Path(path).expanduser()
    if _URL.match(path) and not file.exists():
        raise SettingsError(f"{kind} {path}: nothing is fetched. Download it, and give the path of the file.")
    if not file.is_file():
        found = "is no file" if file.exists() else "there is no such file"
        raise SettingsError(f"{kind} {path}: {found}. Give {remedy}.")
    return forge_data.Media(kind, path=os.path.abspath(file), kind=kind)


def with_media(text: str, media: Sequence[forge_data.Media]) -> tuple[str | list[dict[str, str]], list[forge_data.Media]]:
    """Return the content of a message with media, and these in its order.

    They stand at their marks in the text (`<image>`, `<video>`, `<audio>`), as in rows; without a mark of their kind before it.
    Without media it is the text.

    Raises:
        SettingsError: a text has other marks of a kind than media are given.

    >>> with_media("What is it?", [forge_data.Media("image", "plum.png")])[0]
    [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    >>> with_media("Is <image> a plum?", [forge_data.Media("image", "plum.png")])[0]
    [{'type': 'text', 'text': 'Is '}, {'type': 'image'}, {'type': 'text', 'text': ' a plum?'}]
    """
    following: dict[str, list[forge_data.Media]] = {}
    for each in media:
        following.setdefault(each.kind, []).append(each)
    for kind, given in following.items():
        if (marks := text.count(f"<{kind}>")) not in (0, len(given)):
            raise SettingsError(
                f"the prompt has <{kind}> in it {counted(marks, 'times')}, and --{kind} is given "
                f"{counted(len(given), 'times')}: give each its place, or leave <{kind}> out, and all stand before the text."
            )
    if not media:
        return text, []
    pieces = re.split(f"(<(?:{'|'.join(following)})>)", text)
    marked = [piece[1:-1] for piece in pieces[1::2]]
    found = [each for each in media if each.kind not in marked]
    parts = [{"type": str(each.kind)} for each in found]
    for at, piece in enumerate(pieces):
        if at % 2:
            found.append(following[piece[1:-1]].pop(0))
            parts.append({"type": piece[1:-1]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts, found


class AnsweringModel:
    """Loaded model with its tokenizer and the chat template that it was trained with.

    Args:
        model_path: a run (its last export), a model or an adapter directory, or a hub name.
        seed: of the sampling.

    """

    def __init__(self, model_path: str | Path, *, seed: int = 42) -> None:
        directory = find_model(model_path)
        self._system_prompt = run_system_prompt(directory)
        self._machine = forge_accel.accelerator()
        self._machine.seed(seed)
        dtype = self._machine.dtype("auto").value
        rounding = rounding_of(directory)
        with Reporter(lambda _: None).taking(f"loading {directory}", f"loaded {directory}"):
            self._model: Any = load_rounded(
                directory,
                rounding,
                dtype=dtype,
                device=self._machine.device.value,
                # What computes on images and audio does so in float32 too, as while training.
                other_dtype=dtype if dtype.itemsize == 4 else None,
            )
        self._directory = directory
        self._warned: set[bool] = set()
        """Whether conversations that it warned of were beyond the model's positions themselves."""
        forge_algos.name_cache_for_peft(self._model)
        self._tokenizer: Any = forge_data.load_tokenizer(directory)
        # An adapter has no generation_config.json of its own.
        stop_at_turn_end(self._model, self._tokenizer, trained_turn_end(directory))
        asked_with = _template(self._tokenizer.chat_template, model_path)
        self.about: str = f"{directory}: {'; '.join(filter(None, (asked_with, rounding.said)))}"
        """Which chat template and which thinking mode answers are asked with, and what weights are rounded to, in words."""
        self.about_answer: str | None = None
        """How the last answer came about where it is empty, in words."""
        self._data = Path(directory).expanduser().absolute().parent.parent / "data" / "train"

    def system(self, given: str | None) -> str | None:
        """Return the system message to ask with: the one given, none for "", or the run's own."""
        return self._system_prompt if given is None else given or None

    def about_system(self, system: str | None) -> str | None:
        """Say whose system message is asked with, or that the training rows' is not.

        None where it is the one given, or where the rows share none or are not there.
        """
        if system is None and self._system_prompt is not None and self.converses:
            shown = shlex.quote(printable(self._system_prompt, keep="\n"))
            return f"asked with the run's system_prompt {shown}; without it: --system ''"
        try:
            trained = shared_system(forge_data.TokenStore.open(self._data), self._tokenizer)
        except forge_data.ForgeDataError:
            return None  # the model of no run, or its rows are away, or prompts
        if trained is None or trained == self.system(system):
            return None
        option = shlex.quote(printable(trained, keep="\n"))
        return f"asked without the system message of the training rows; with it: --system {option}"

    @property
    def converses(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def takes_media(self) -> bool:
        """Whether the model has parts beside its language part, for images or audio."""
        config = self._model.config
        return config.get_text_config() is not config

    def answer(
        self,
        asked: str | Sequence[Mapping[str, Any]],
        sampling: Sampling,
        shown: Callable[[str], None] | None = None,
        *,
        media: Sequence[forge_data.Media] = (),
    ) -> str:
        """Answer a conversation, or continue a text where there is no chat template.

        Args:
            asked: messages, or a text that is continued as it stands; without a chat template the last message is one.
            sampling: how the answer is drawn.
            shown: is given the answer piece by piece, as it is made.
            media: of the messages' parts, such as `{"type": "image"}`, in their order.

        Returns:
            The answer, without special tokens.

        Raises:
            SettingsError: there is no room for an answer, or the model takes no such media.
            forge_data.ForgeDataError: one cannot be read, or the model has no processor that could be used.

        """
        inputs = self._inputs(asked, media)
        self._check_room(inputs["input_ids"].shape[1], sampling)
        self._warn_of_context(inputs["input_ids"].shape[1], sampling)
        drawn = (
            {"do_sample": True, "temperature": sampling.temperature}
            if sampling.temperature
            else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        )
        prompt = inputs["input_ids"].shape[1]
        stops = {"stopping_criteria": [until_stop(self._tokenizer, sampling.stop, prompt)]} if sampling.stop else {}
        streamer = None if shown is None else {"streamer": _streamer(self._tokenizer, shown, sampling.stop)}
        pad = self._tokenizer.pad_token_id
        with warnings.catch_warnings(), self._refusing(media):
            # PEFT counts the positions behind virtual tokens itself, as it should.
            warnings.filterwarnings("ignore", message="Position ids are not supported")
            tokens = self._model.generate(
                **inputs,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=pad if pad is not None else self._tokenizer.eos_token_id,
                **drawn,
                **stops,
                **(streamer or {}),
            )
        made = str(self._tokenizer.decode(tokens[0, prompt:], skip_special_tokens=True))
        drawn_ids, eos = tokens[0, prompt:].tolist(), self._model.generation_config.eos_token_id
        ended = drawn_ids[-1:] and drawn_ids[-1] in (eos if isinstance(eos, list) else [eos])
        end = end_of(made, sampling.stop)
        answer = made[:end].strip()
        self.about_answer = None if answer else about_nothing(made, len(drawn_ids), cut_off=not ended, stopped=end < len(made))
        return answer

    @contextmanager
    def _refusing(self, media: Sequence[forge_data.Media]) -> Iterator[None]:
        """Turn what a model raises on media that it cannot run into a SettingsError.

        Qwen2-Audio of 5.24 raises TypeError where each clip is of one token.
        """
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            import torch

            if not media or isinstance(error, torch.OutOfMemoryError):
                raise
            which = ", ".join(medium.path or medium.field for medium in media)
            raise SettingsError(
                f"the model cannot run {which}: {type(error).__name__}: {error}. Give a longer clip or a larger image, or "
                "leave it out; --debug shows where the model ended."
            ) from error

    def _inputs(self, asked: str | Sequence[Mapping[str, Any]], media: Sequence[forge_data.Media]) -> dict[str, Any]:
        """Return the arguments of the first forward, as training makes them, on the device."""
        device = self._machine.device.value
        content = asked if isinstance(asked, str) else asked[-1]["content"]
        plain = isinstance(asked, str) or not self.converses
        if plain and not media:
            inputs = self._tokenizer(content_text(content), return_tensors="pt")
        else:
            of_media = self._of_media if media else None
            text = content_text(content) if plain else self._written(asked)
            places = media_places(content) if plain else None
            if of_media is not None:
                import torch

                arrays = of_media.prompt(text, media, places=places)
                ids = torch.tensor(arrays.pop("input_ids"), device=device)
                inputs = forge_algos.media_row_inputs(self._model, ids[0], (0, ids.shape[1]), [arrays], packed={})
                inputs.pop("use_cache")  # which training does without
                return inputs | {"attention_mask": ids.new_ones(ids.shape)}
            inputs = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}

    def _written(self, asked: Any) -> str:
        """Return a conversation as the chat template writes it.

        Raises:
            SettingsError: it does not write contents with media.

        """
        try:
            return str(self._tokenizer.apply_chat_template(list(asked), tokenize=False, add_generation_prompt=True))
        except Exception as error:
            if all(isinstance(message["content"], str) for message in asked):
                raise
            raise SettingsError(
                f"{self._directory}: its chat template does not write a message with media: "
                f"{' '.join(str(error).split())}. Use the template of the model's processor."
            ) from error

    @cached_property
    def _of_media(self) -> forge_data.MediaInputs:
        """Processor of the directory; of an adapter without one, of its base.

        Raises:
            SettingsError: virtual tokens stand before the prompt.
            forge_data.TokenizerError: there is none that could be used.

        """
        if getattr(getattr(self._model, "active_peft_config", None), "is_prompt_learning", False):
            raise SettingsError(f"{self._directory}: virtual tokens move the places of media. Ask it with text alone.")
        folder, directory = Path(self._directory).expanduser(), self._directory
        if (folder / "adapter_config.json").is_file() and not any((folder / name).is_file() for name in _PROCESSOR):
            directory = forge_dist.adapter_base(folder).path
        try:
            return forge_data.MediaInputs(directory, tokenizer=self._tokenizer)
        except forge_data.TokenizerError as error:
            raise forge_data.TokenizerError(f"{directory} cannot be asked about media: {error}") from error

    def _check_room(self, tokens: int, sampling: Sampling) -> None:
        """Raise SettingsError where prompt and answer exceed the model's table of positions."""
        table = forge_dist.position_table(self._model)
        if table is None or tokens + sampling.max_new_tokens <= table:
            return
        left = table - tokens
        remedy = f"Set max_new_tokens to {left:,} or less, or shorten" if left > 0 else "Shorten"
        raise SettingsError(
            f"the conversation has {tokens:,} tokens, and an answer of max_new_tokens={sampling.max_new_tokens:,} may follow; "
            f"this model has a table of {table:,} positions, beyond which it reads nothing. {remedy} the conversation."
        )

    def _warn_of_context(self, tokens: int, sampling: Sampling) -> None:
        """Say once that a conversation, or once that its answer, exceeds the model's positions."""
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        whole = tokens + sampling.max_new_tokens
        if not isinstance(limit, int) or not 0 < limit < whole or (beyond := tokens >= limit) in self._warned:
            return
        self._warned |= {beyond}
        # Which transformers says too, once it has gone beyond, without the tokens.
        logging.getLogger("transformers.generation.stopping_criteria").addFilter(_no_reminder)
        may = "" if beyond else f", and an answer of up to {sampling.max_new_tokens:,} may follow"
        print(
            f"WARNING: the conversation has {tokens:,} tokens{may}; this model was made for {limit:,} positions "
            "(max_position_embeddings), beyond which it answers worse.",
            file=sys.stderr,
        )


def _no_reminder(record: logging.LogRecord) -> bool:
    return "friendly reminder" not in record.getMessage()


def _streamer(tokenizer: Any, shown: Callable[[str], None], stop: Sequence[str]) -> Any:
    """Return a streamer of transformers that shows text, but none that may become a stop string."""
    from transformers import TextStreamer

    class Shown(TextStreamer):
        answer = BeforeStop(stop)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if piece := self.answer.add(text) + (self.answer.rest() if stream_end else ""):
                shown(piece)

    return Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _template(template: Any, model_path: str | Path) -> str:
    """Say which template a model is asked with, and how its switch of the thinking mode stands."""
    if not template:
        return "no chat template: the prompt is continued as it stands"
    run = Path(model_path).expanduser()
    of_run = (run / "config.yaml").is_file()
    values = run_values(run) if of_run else {}
    arguments = values.get("chat_template_kwargs") or {}
    whose = "the chat template that it was trained with" if of_run else "its own chat template"
    if _SWITCH not in str(template):
        return f"{whose}; it has no thinking mode"
    if _SWITCH in arguments:
        return f"{whose}; thinking mode: {_SWITCH}={json.dumps(arguments[_SWITCH])}, as it was trained"
    return f"{whose}; thinking mode: the template's own choice ({_SWITCH} is not set)"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
