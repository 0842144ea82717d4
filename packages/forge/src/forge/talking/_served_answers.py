"""Answers of transformers' server → those of OpenAI's interface.

They end before stop strings, and a stream says its end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from forge.talking._stops import BeforeStop, end_of

_DONE = "data: [DONE]\n\n"
_ERROR = 'data: {"error": '


def error_of(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def without_stops(answer: dict[str, Any], stop: Sequence[str]) -> dict[str, Any]:
    """Cut the texts of a whole answer before a stop string."""
    for choice in answer.get("choices", ()) if stop else ():
        holder, field = _text_of(choice)
        text = holder.get(field)
        if isinstance(text, str) and (end := end_of(text, stop)) < len(text):
            holder[field], choice["finish_reason"] = text[:end], "stop"
    return answer


def joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer with the choices of several; its usage counts the prompt once."""
    choices = [choice | {"index": number} for number, answer in enumerate(answers) for choice in answer["choices"]]
    return answers[0] | {"choices": choices, "usage": _used([answer["usage"] for answer in answers])}


def _used(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(usages) == 1:
        return usages[0]
    prompt, drawn = usages[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in usages)
    return usages[0] | {"completion_tokens": drawn, "total_tokens": prompt + drawn}


async def served_events(answers: AsyncIterator[AsyncIterator[Any]], stop: Sequence[str]) -> AsyncIterator[str]:
    """Cut the pieces of streamed answers before a stop string, and end them with `[DONE]`.

    An error is made JSON, which it is not where its message has quotes, and no choice follows it. Each choice ends with the
    usage up to there.
    """
    usages: list[dict[str, Any]] = []
    number, failed = 0, False
    async for events in answers:
        answer = BeforeStop(stop)
        async for sent in events:
            text = sent.decode() if isinstance(sent, bytes) else sent
            made = [each for event in text.split("\n\n") if event.strip() for each in _event(event, answer, number, usages)]
            failed = failed or any(each.startswith(_ERROR) for each in made)
            yield "".join(made)
        if failed:
            break
        number += 1
    yield _DONE


def _event(event: str, answer: BeforeStop, number: int, usages: list[dict[str, Any]]) -> list[str]:
    said = event.removeprefix("data: ")
    try:
        chunk: dict[str, Any] = json.loads(said)
    except ValueError:
        chunk = {"error": said.removeprefix('{"error": "').removesuffix('"}')}
    if "error" in chunk:
        return [_data(error_of(f"the answer broke off: {chunk['error']}", 500))]
    made: list[str] = []
    if chunk.get("usage"):
        usages.append(chunk["usage"])
        chunk["usage"] = _used(usages)
    for choice in chunk.get("choices", ()):
        choice["index"] = number
        holder, field = _text_of(choice)
        text = holder.get(field)
        if choice.get("finish_reason") is not None:
            if rest := answer.add(text or "") + answer.rest():
                made.append(_data(chunk | {"choices": [_with_text(choice, rest)], "usage": None}))
            if field in holder:
                holder[field] = ""
            if answer.stopped:
                choice["finish_reason"] = "stop"
        elif isinstance(text, str) and text:
            holder[field] = answer.add(text)
            if not holder[field]:
                return made
    return [*made, _data(chunk)]


def _text_of(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what holds the text of a choice, and its field."""
    for name in ("delta", "message"):
        if isinstance(choice.get(name), dict):
            return choice[name], "content"
    return choice, "text"


def _with_text(choice: dict[str, Any], text: str) -> dict[str, Any]:
    own = {"delta": {"content": text}} if "delta" in choice else {"text": text}
    return {"index": choice.get("index", 0), "finish_reason": None, **own}


def _data(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
