"""Answers of a server, whole and streamed: they end before a stop string, and a stream says its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forge.talking._served_answers import served_events, without_stops
from forge.talking._stops import BeforeStop


@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_pieces_of_any_size(size: int) -> None:
    """Together they are the answer before the first stop string, whatever came at once."""
    text = "one ENtwo END three"
    for stop, expected in ((["END"], "one ENtwo "), (["XYZ"], text), (["three", "ENt"], "one "), ([], text)):
        answer = BeforeStop(stop)
        made = [answer.add(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(made) + answer.rest() == expected
        assert answer.stopped == (expected != text)


def streamed(chunks: list[Any], *stop: str) -> list[Any]:
    """Return the events of a stream, read as JSON."""

    async def events() -> AsyncIterator[str]:
        for each in chunks:
            yield each if isinstance(each, str) else f"data: {json.dumps(each)}\n\n"

    async def collected() -> str:
        return "".join([each async for each in served_events(one(), stop)])

    async def one() -> AsyncIterator[AsyncIterator[str]]:
        yield events()

    said = [each.removeprefix("data: ") for each in asyncio.run(collected()).split("\n\n") if each]
    return [each if each == "[DONE]" else json.loads(each) for each in said]


def piece(text: str | None = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a chunk of a conversation's answer."""
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": reason}], **more}


def test_a_stream() -> None:
    """What may become a stop string is held back, and shown where it does not; the reason is `stop` where it does."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
    two = "".join(f"data: {json.dumps(piece(each))}\n\n" for each in ("b E", "N"))
    *found, last, done = streamed(
        [role, piece("a"), two, piece("D c"), piece(None, "length", usage={"total_tokens": 3})], "END"
    )
    assert [each["choices"][0]["delta"] for each in found] == [{"role": "assistant"}, {"content": "a"}, {"content": "b "}]
    assert (last["choices"][0]["finish_reason"], last["usage"], done) == ("stop", {"total_tokens": 3}, "[DONE]")
    texts = [
        each["choices"][0]["delta"].get("content") for each in streamed([piece("a EN"), piece(None, "length")], "END")[:-1]
    ]
    assert texts == ["a ", "EN", None]
    (plain, ended, _) = streamed(
        [{"choices": [{"text": "a", "index": 0}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}]
    )
    assert (plain["choices"][0]["text"], ended["choices"][0]["text"]) == ("a", "")


def test_an_error_in_a_stream_is_json() -> None:
    """transformers' server writes its message between quotes as it is."""
    error, done = streamed(['data: {"error": "no "room" here\nat all"}\n\n'])
    assert error["error"]["message"] == 'the answer broke off: no "room" here\nat all'
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")


def test_a_whole_answer() -> None:
    """Of conversations and of completions."""
    chat = {"choices": [{"message": {"content": "1, 2, 3"}, "finish_reason": "length"}]}
    assert without_stops(chat, ["3"])["choices"] == [{"message": {"content": "1, 2, "}, "finish_reason": "stop"}]
    text = {"choices": [{"text": "1, 2", "finish_reason": "length"}]}
    assert without_stops(text, ["3"])["choices"] == [{"text": "1, 2", "finish_reason": "length"}]
