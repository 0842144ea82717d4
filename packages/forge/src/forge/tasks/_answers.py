"""Prompts of `eval_prompts` → answers of the model at each measurement, in answers.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import forge_algos
import forge_data
import forge_dist
from forge._clock import now
from forge._content import content_text, media_places
from forge._disk import writing
from forge._errors import SettingsError
from forge.tasks._media import media_inputs
from forge.tasks._rollouts import sampler_of
from forge.tasks._system_message import with_system_prompt
from forge.tasks._task import Run, Task
from forge.tasks.items._items import VIRTUAL

_FILE = "answers.jsonl"
Messages = list[dict[str, Any]]


class Asked(NamedTuple):
    """A prompt of `eval_prompts`."""

    prompt: str | Messages
    where: str
    """File and row, or the text itself where it was given so."""
    media: tuple[forge_data.Media, ...] = ()
    """Media of the parts of its messages, such as `{"type": "image"}`, in order."""

    @property
    def shown(self) -> str | Messages:
        """The prompt with the names of its media: their files, or the fields that hold them."""
        if isinstance(self.prompt, str) or not self.media:
            return self.prompt
        names = iter([medium.path or medium.field for medium in self.media])

        def named(content: Any) -> Any:
            parts = content if isinstance(content, list) else ()
            return [part if part["type"] == "text" else part | {part["type"]: next(names)} for part in parts] or content

        return [message | {"content": named(message["content"])} for message in self.prompt]


class Prompt(NamedTuple):
    """A prompt as the model is asked."""

    ids: Any
    """int32[S]."""
    inputs: dict[str, Any]
    """What the model's processor makes of its media."""


def read_prompts(task: Task, s: Any) -> list[Asked]:
    """Read the prompts of `eval_prompts`, texts and files, and put `system_prompt` before them.

    Raises:
        SettingsError: a file cannot be read or holds something else, or the verb trains no model that writes text; or a medium
            where it cannot be asked about.
        forge_data.DataError: a medium in a form that no row has.

    """
    given = s.evaluation.eval_prompts or ()
    if given and task.model_task(s) != "causal":
        raise SettingsError(
            "eval_prompts has no effect: a reward model gives texts a number and writes none, and so do a classifier and an "
            "embedding model. Leave it out."
        )
    found: list[Asked] = []
    system_prompt = getattr(s.data, "system_prompt", None)
    for each in given:
        if not each.strip():
            raise SettingsError("eval_prompts holds an empty prompt. Leave it out.")
        found += _of_file(Path(each)) if is_prompt_file(each) else [Asked(each, repr(_short(each)))]
    for asked in found:
        try:
            json.dumps(asked.prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise SettingsError(f"eval_prompts {asked.where}: is not UTF-8: {error.reason}.") from error
        if asked.media:
            _check_media(task, s, asked)
    return [asked._replace(prompt=with_system_prompt(asked.prompt, system_prompt)) for asked in found]


def _check_media(task: Task, s: Any, asked: Asked) -> None:
    """Refuse a medium where the verb, the adapter or the strategy allows for none."""
    one = {"image": "an image", "video": "a video", "audio": "an audio clip"}[kind := asked.media[0].kind]
    what = f"eval_prompts {asked.where}: has {one}, and"
    if not task.media:
        raise SettingsError(f"{what} forge {task.name} trains on text alone. Ask an export: forge generate RUN --{kind} FILE.")
    if s.adapter.adapter in VIRTUAL:
        raise SettingsError(
            f"{what} the virtual tokens of adapter={s.adapter.adapter} move its place. Use adapter=lora, or take it out."
        )


def is_prompt_file(prompt: str) -> bool:
    """Return whether a prompt is the name of a file."""
    try:
        return Path(prompt).is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return False


class Answers:
    """Greedy answers to a few prompts, in the log and the run directory; no number is drawn.

    Args:
        run: the run; every rank makes one of these and calls it at the same steps.
        prompts: what is asked.
        path: the run directory.
        step: the last step whose answers are kept, those of later steps are made again; -1 of a run that begins anew.

    """

    def __init__(self, run: Run, prompts: Sequence[Asked], path: Path, step: int) -> None:
        self._run, self._prompts, self._file = run, prompts, path / _FILE
        self._step = -1
        if not prompts:
            return
        self._asked: list[Prompt] | None = None
        if run.ranks.is_first and self._file.exists():
            # Bytes: a line may be torn within a sign, and a text splits at more than newlines.
            kept = [line for line in self._file.read_bytes().split(b"\n") if _step_of(line) <= step]
            forge_dist.write_bytes_atomically(self._file, b"".join(line + b"\n" for line in kept))
            self._step = max(map(_step_of, kept), default=-1)
        self._step = run.ranks.broadcast(self._step)

    def write(self, step: int) -> None:
        """Answer each prompt, unless those of this step are there; every rank calls this."""
        if not self._prompts or step <= self._step:
            return
        run, self._step = self._run, step
        first = run.strategy.data_parallel_rank == 0
        if not first and not run.strategy.divides:
            return
        if self._asked is None:
            # Images are read once: the same ones are asked about at each measurement.
            self._asked = prompts_of(run.settings, run.tokenizer, self._prompts)
            self._sampler = sampler_of(run, _sampled_media(run.settings, run.tokenizer, self._asked))
        asked, pictured = self._asked if first else [], any(each.inputs for each in self._asked)
        made = self._sampler.sample(
            [each.ids for each in asked],
            num_generations=1,
            max_new_tokens=run.settings.evaluation.eval_max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=1,
            seed=0,
            media=[partial(dict, each.inputs) if each.inputs else None for each in asked] if pictured else None,
        )
        if not run.ranks.is_first:
            return
        at = f"{now():%Y-%m-%dT%H:%M:%SZ}"
        lines = []
        for each, completion in zip(self._prompts, made, strict=True):
            answer, prompt = str(run.tokenizer.decode(completion.ids, skip_special_tokens=True)).strip(), each.shown
            lines.append(json.dumps({"step": step, "prompt": prompt, "answer": answer, "time": at}, ensure_ascii=False) + "\n")
            last = prompt if isinstance(prompt, str) else content_text(prompt[-1]["content"])
            run.report.note(f"after step {step}, asked {_short(last)!r}: {_short(answer)!r}")
        with writing(self._file), self._file.open("a", encoding="utf-8") as file:
            file.writelines(lines)


def prompts_of(s: Any, tokenizer: Any, prompts: Sequence[Asked]) -> list[Prompt]:
    """Return prompts as the model is asked, by its chat template and its processor.

    Raises:
        SettingsError: the template refuses one, nothing is left of one, or the model takes no images.
        forge_data.DataError: an image cannot be read.
        forge_data.TokenizerError: the processor does not say what it writes for an image.

    """
    found = []
    for asked in prompts:
        text = _written(tokenizer, asked)
        if asked.media:
            last: Any = asked.prompt[-1]
            places = None if tokenizer.chat_template else media_places(last["content"])
            where = f"eval_prompts {asked.where}"
            try:
                of_media = media_inputs(s, tokenizer)
            except forge_data.TokenizerError as error:
                raise SettingsError(f"{where}: {error}") from error
            made = of_media.prompt(text, asked.media, where, places=places)
            found.append(Prompt(made.pop("input_ids")[0].astype(np.int32), made))
            continue
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        if not ids:
            raise SettingsError(f"eval_prompts {asked.where}: no token is left of it. Give a text, or leave it out.")
        found.append(Prompt(np.asarray(ids, np.int32), {}))
    return found


def documents_of(s: Any, tokenizer: Any, prompts: Sequence[Asked]) -> list[forge_algos.MediaDocument]:
    """Return the first prompt with images, to try an attention on; [] without any."""
    return _documents(s, tokenizer, prompts_of(s, tokenizer, [asked for asked in prompts if asked.media][:1]))


def _documents(s: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[forge_algos.MediaDocument]:
    return [
        forge_algos.MediaDocument(each.ids, each.inputs, media_inputs(s, tokenizer).spans(each.ids))
        for each in prompts
        if each.inputs
    ]


def _sampled_media(s: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> forge_algos.online.SampledMedia | None:
    """Return what the sampler must know of the images of prompts; None where none has any."""
    documents = _documents(s, tokenizer, sorted(prompts, key=lambda each: len(each.ids)))[:2]
    if not documents:
        return None
    of = media_inputs(s, tokenizer)
    return forge_algos.online.SampledMedia(
        documents=documents, token_ids=of.token_ids, joins=of.joins, join=of.join, join_more=partial(of.join, more=True)
    )


def _written(tokenizer: Any, asked: Asked) -> str:
    """Return the text of a prompt as the chat template writes it.

    Raises:
        SettingsError: it does not, or there is none, and the prompt is a conversation with media.

    """
    prompt, where, _ = asked
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise SettingsError(
                f"eval_prompts {where}: the chat template does not write it: {' '.join(str(error).split())}. Write it as the "
                "template takes conversations, or leave it out."
            ) from error
    if asked.media and len(messages) > 1:
        raise SettingsError(
            f"eval_prompts {where}: has media in a conversation, which a chat template writes, and the tokenizer has none. "
            "Give a text and images."
        )
    return content_text(messages[-1]["content"])


def _of_file(path: Path) -> list[Asked]:
    """Read prompts from a file: a line each, or rows of JSON with a prompt or messages."""
    try:
        # By newlines alone: a prompt may hold what Python takes for an end of a line (U+2028).
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise SettingsError(f"eval_prompts {path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    found: list[Asked] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            found.append(Asked(line, where))
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"eval_prompts {where}: is not JSON: {error}.") from error
        found.append(_of_row(row, where, path.parent))
    if not found:
        raise SettingsError(
            f"eval_prompts {path}: holds no prompt: its lines are empty. Write a prompt a line, or leave it out."
        )
    return found


def _of_row(row: Any, where: str, folder: Path) -> Asked:
    """Return the prompt of a row: its `prompt`, or its messages before the last answer.

    Relative paths of media begin in `folder`.
    """
    row = row if isinstance(row, dict) else {"prompt": row}
    name = "prompt" if "prompt" in row else "messages"
    asked = row.get(name)
    if not asked or (isinstance(asked, str) and not asked.strip()):
        asked = asked if isinstance(asked, str) and _has_media(row) else None  # an image may be all that is asked
    if asked is not None and (_has_media(row) or _has_parts(asked)):
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        while isinstance(asked, list) and _is_answer(asked):
            asked = asked[:-1]
        directory = os.path.abspath(folder)
        messages, media = forge_data.messages_with_media(
            row | {name: asked}, name, place=f"eval_prompts {where}", directory=directory
        )
        return Asked(messages, where, media)
    if isinstance(asked, list):
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in asked):
            raise SettingsError(f"eval_prompts {where}: each of its messages must have a role and a content, both texts.")
        while _is_answer(asked):
            asked = asked[:-1]
    if not asked or not isinstance(asked, (str, list)):
        raise SettingsError(f"eval_prompts {where}: holds no prompt: a row has `prompt`, a text or messages, or `messages`.")
    return Asked(asked, where)


def _is_answer(messages: list[Any]) -> bool:
    """Return whether messages end with one of the assistant."""
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _has_parts(asked: str | list[Any]) -> bool:
    """Return whether a message has its text in parts, as OpenAI writes it beside images."""
    contents = [each.get("content") for each in asked if isinstance(each, dict)]
    return any(isinstance(each, list) and each and isinstance(each[0], dict) for each in contents)


def _has_media(row: dict[str, Any]) -> bool:
    """Return whether a row of JSON has media: a column, or a part of a content."""
    given = [row.get("prompt"), row.get("messages")]
    messages = [each for part in given if isinstance(part, list) for each in part if isinstance(each, dict)]
    contents = [each["content"] for each in messages if isinstance(each.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    kinds = ("image", "video", "audio")
    return any(row.get(kind) or row.get(f"{kind}s") for kind in kinds) or any(
        kind in str(part.get("type")) for part in parts for kind in kinds
    )


def _step_of(line: bytes) -> int:
    """Return the step of a line; one that a kill tore is of no step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62


def _short(text: str) -> str:
    """Return a text for the log."""
    return text if len(text) <= 200 else text[:199] + "…"
