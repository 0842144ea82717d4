"""Prompts of `eval_prompts` → answers of the model at each measurement, in answers.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import forge_dist
from forge._disk import writing
from forge._errors import SettingsError
from forge.tasks._rollouts import sampler_of
from forge.tasks._task import Run, Task

_FILE = "answers.jsonl"
Messages = list[dict[str, str]]


class Asked(NamedTuple):
    """A prompt of `eval_prompts`."""

    prompt: str | Messages
    where: str
    """File and row, or the text itself where it was given so."""


def read_prompts(task: Task, s: Any) -> list[Asked]:
    """Read the prompts of `eval_prompts`: texts, and those of files.

    Raises:
        SettingsError: a file cannot be read or holds something else, or the verb trains no model that writes text.

    """
    given = s.evaluation.eval_prompts or ()
    if given and task.model_task(s) != "causal":
        raise SettingsError(
            "eval_prompts has no effect: a reward model gives texts a number and writes none, and so do a classifier and an "
            "embedding model. Leave it out."
        )
    found: list[Asked] = []
    for each in given:
        if not each.strip():
            raise SettingsError("eval_prompts holds an empty prompt. Leave it out.")
        found += _of_file(Path(each)) if is_prompt_file(each) else [Asked(each, repr(_short(each)))]
    for prompt, where in found:
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise SettingsError(f"eval_prompts {where}: is not UTF-8: {error.reason}.") from error
    return found


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
        self._sampler = sampler_of(run)
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
        mine = [tokenized(run.tokenizer, asked) for asked in self._prompts] if run.strategy.data_parallel_rank == 0 else []
        if not mine and not run.strategy.divides:
            return
        made = self._sampler.sample(
            mine,
            num_generations=1,
            max_new_tokens=run.settings.evaluation.eval_max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=1,
            seed=0,
        )
        if not run.ranks.is_first:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = []
        for (prompt, _), completion in zip(self._prompts, made, strict=True):
            answer = str(run.tokenizer.decode(completion.ids, skip_special_tokens=True)).strip()
            lines.append(json.dumps({"step": step, "prompt": prompt, "answer": answer, "time": now}, ensure_ascii=False) + "\n")
            asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            run.report.note(f"after step {step}, asked {_short(asked)!r}: {_short(answer)!r}")
        with writing(self._file), self._file.open("a", encoding="utf-8") as file:
            file.writelines(lines)


def tokenized(tokenizer: Any, asked: Asked) -> Any:
    """Tokenize a prompt as the model is asked: by its chat template, where it has one.

    Raises:
        SettingsError: the template refuses it, or nothing is left of it.

    """
    prompt, where = asked
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise SettingsError(
                f"eval_prompts {where}: the chat template does not write it: {' '.join(str(error).split())}. Write it as the "
                "template takes conversations, or leave it out."
            ) from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(messages[-1]["content"])["input_ids"]
    if not ids:
        raise SettingsError(f"eval_prompts {where}: no token is left of it. Give a text, or leave it out.")
    return np.asarray(ids, np.int32)


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
        found.append(Asked(_of_row(row, where), where))
    if not found:
        raise SettingsError(
            f"eval_prompts {path}: holds no prompt: its lines are empty. Write a prompt a line, or leave it out."
        )
    return found


def _of_row(row: Any, where: str) -> str | Messages:
    """Return the prompt of a row: its `prompt`, or its messages before the last answer."""
    asked = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
    if isinstance(asked, str) and not asked.strip():
        asked = None
    if has_image(row):
        raise SettingsError(
            f"eval_prompts {where}: has an image, and eval_prompts are asked as texts. Take the row out, and ask an export "
            "about images: forge generate RUN --image FILE."
        )
    if isinstance(asked, list):
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in asked):
            raise SettingsError(f"eval_prompts {where}: each of its messages must have a role and a content, both texts.")
        while asked and asked[-1]["role"] == "assistant":
            asked = asked[:-1]
    if not asked or not isinstance(asked, (str, list)):
        raise SettingsError(f"eval_prompts {where}: holds no prompt: a row has `prompt`, a text or messages, or `messages`.")
    return asked


def has_image(row: Any) -> bool:
    """Return whether a row of JSON has an image: in a column, or as a part of a content."""
    if not isinstance(row, dict):
        return False
    given = [row.get("prompt"), row.get("messages")]
    messages = [each for part in given if isinstance(part, list) for each in part if isinstance(each, dict)]
    contents = [each["content"] for each in messages if isinstance(each.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    return bool(row.get("image") or row.get("images")) or any("image" in str(part.get("type")) for part in parts)


def _step_of(line: bytes) -> int:
    """Return the step of a line; one that a kill tore is of no step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62


def _short(text: str) -> str:
    """Return a text for the log."""
    return text if len(text) <= 200 else text[:199] + "…"
