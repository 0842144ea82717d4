"""Tokens of a model's turn → its message; an observation → the tokens up to the next turn.

For episodes of several turns: what the model wrote stays as it was sampled, and what stands between its turns is written by the
chat template. Neither is ever tokenised twice.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_data._errors import TemplateError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_ASKED = [{"role": "user", "content": "forge asks"}]
_ANSWER = "forge answers here"
_NAME, _KEY, _VALUE = "forge_tool", "forge_key", "forge_value"
_CALL = {"type": "function", "id": "forge12ab", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}


class _CallForm(NamedTuple):
    """How a template writes a call of a tool: text, then JSON."""

    before: str
    name: str
    arguments: str


class TurnReader:
    """Reads the model's turns and writes observations, with one tokenizer and its chat template.

    Args:
        tokenizer: with its chat template; one without writes plain text alone.
        end_ids: ids of the tokens that end a turn.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, end_ids: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(end_ids)

    def message(self, ids: Sequence[int], *, chat: bool = True) -> dict[str, Any]:
        """Read a turn of the model, with the token that ends it, as a message.

        `content` is its text. In a chat `tool_calls` are parsed as the tokenizer's `response_template` says, or as the chat
        template writes them where that is as JSON; a call in another form stays in the content.
        """
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        if not chat:
            return {"role": "assistant", "content": text}
        if getattr(self._tokenizer, "response_template", None) is not None:
            parsed: Any = self._tokenizer.parse_response(list(ids), prefix="")
            return {"role": "assistant", "content": text, **parsed}
        end = len(ids) - (len(ids) > 0 and ids[-1] in self._ends)
        whole = str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False))
        content, calls = self._calls(whole) if self._call_form is not None else (text, [])
        return (
            {"role": "assistant", "content": content.strip(), "tool_calls": calls}
            if calls
            else {
                "role": "assistant",
                "content": text,
            }
        )

    def observation(self, observation: str | Sequence[Mapping[str, Any]], *, chat: bool = True) -> "NDArray[np.int32]":
        """Write what stands between the end of a turn and the beginning of the next: int32[S].

        Text is the user's next turn in a chat, and else appended as it is; messages are written by the template.

        Raises:
            TemplateError: the template refuses such messages, or ends a turn with a token that ends no completion.
        """
        if not chat:
            if not isinstance(observation, str):
                raise TemplateError("an observation of messages needs prompts of messages; return text")
            return self._ids(observation)
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else [*map(dict, observation)]
        rest = self._after_answer(messages)
        ids = self._ids(rest)
        if not len(ids) or int(ids[0]) not in self._ends:
            shown = self._tokenizer.decode(ids[:1].tolist()) if len(ids) else ""
            raise TemplateError(
                f"the chat template ends a turn of the assistant with {shown!r}, which ends no completion: what the model "
                "would go on from is no conversation that the template writes; use a template that ends turns with the EOS, "
                "or name its end as eos_token_id in generation_config.json"
            )
        return ids[1:]

    def _after_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render messages after an answer; return what follows the answer's text."""
        called = any(message.get("role") == "tool" for message in messages)
        answers: list[dict[str, Any]] = [{"role": "assistant", "content": _ANSWER}]
        if called:
            # Some templates take a tool's result only after a call.
            answers.append({"role": "assistant", "content": _ANSWER, "tool_calls": [_CALL]})
        failed: Exception | None = None
        for answer in answers:
            try:
                before = self._render([*_ASKED, answer])
                text = self._render([*_ASKED, answer, *messages], opening=True)
            except Exception as error:  # noqa: BLE001 - a template may raise anything
                failed = error
                continue
            if "tool_calls" in answer:
                if text.startswith(before):
                    # The call stands between the text and the turn's end, which is the last end before the messages.
                    return self._last_end(before) + text[len(before) :]
                continue
            if _ANSWER in text:
                return text.rpartition(_ANSWER)[2]
        why = f": {' '.join(str(failed).split())}" if failed is not None else ", and leaves out the answer before it"
        raise TemplateError(f"the chat template does not write the observation {list(messages)!r}{why}")

    def _last_end(self, text: str) -> str:
        """Return the end of a rendered turn, from its last token that ends a completion."""
        ends = [str(self._tokenizer.decode([one])) for one in self._ends]
        at = max((text.rfind(end) for end in ends if end), default=-1)
        return text[at:] if at >= 0 else ""

    @cached_property
    def _call_form(self) -> _CallForm | None:
        """How the template writes a call; None where that is not as JSON."""
        try:
            opening = self._render(_ASKED, opening=True)
            text = self._render([*_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}])
        except Exception:  # noqa: BLE001 - a template may raise anything
            return None
        body = text[len(opening) :] if text.startswith(opening) else text[len(self._render(_ASKED)) :]
        for at, sign in enumerate(body):
            if sign not in "{[":
                continue
            try:
                found, _ = json.JSONDecoder().raw_decode(body, at)
            except ValueError:
                continue
            call = found[0] if isinstance(found, list) and found else found
            call = call.get("function", call) if isinstance(call, dict) else {}
            names = {key for key, value in call.items() if value == _NAME}
            arguments = {key for key, value in call.items() if value == {_KEY: _VALUE}}
            if names and arguments:
                return _CallForm(body[:at].strip(), names.pop(), arguments.pop())
        return None

    def _calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text before the first call, and the calls; one that is no JSON is text."""
        form = self._call_form
        assert form is not None
        calls: list[dict[str, Any]] = []
        first, at = len(text), 0
        while at >= 0 and (at := text.find(form.before, at) if form.before else at) >= 0:
            begin = at + len(form.before)
            begin += len(text[begin:]) - len(text[begin:].lstrip())
            try:
                found, end = json.JSONDecoder().raw_decode(text, begin)
            except ValueError:
                if not form.before:
                    break
                at = begin
                continue
            for each in found if isinstance(found, list) else [found]:
                call = each.get("function", each) if isinstance(each, dict) else {}
                if isinstance(call.get(form.name), str):
                    function = {"name": call[form.name], "arguments": call.get(form.arguments) or {}}
                    calls.append({"type": "function", "function": function})
                    first = min(first, at)
            at = end
            if not form.before:
                break
        return text[:first], calls

    def _render(self, messages: Sequence[Mapping[str, Any]], *, opening: bool = False) -> str:
        if not self._tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template, and prompts of messages need one")
        asked: Any = [dict(message) for message in messages]
        return str(self._tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=opening))

    def _ids(self, text: str) -> "NDArray[np.int32]":
        encoded: Any = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return np.array(encoded["input_ids"], np.int32)
