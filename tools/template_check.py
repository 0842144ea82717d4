"""One chat template → fifteen conversations, compared with what it asks and writes itself.

The comparison knows nothing of how forge_data finds what is learned. For a learned turn i of a conversation, P is what
`apply_chat_template` writes of the messages before it with the generation prompt, and F what it writes of the messages up to
and with it. The turn must be learned once, as F without P, behind P; nothing else may be learned. Tokens are compared, of a
small tokenizer that is trained on the spot and has the template's special tokens.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import forge_data
from forge_data import TokenizedExample

Row = Mapping[str, Any]
Message = dict[str, Any]
Answer = dict[str, str]
"""What came of a case: its `state`, and in `says` the reason.

Where forge_data refuses a conversation, the template may be at fault: it cannot write it, or leaves out a part of it
("template refuses"), or prompts for a turn with a text that nothing it writes of it begins with ("prompts otherwise")."""

RIGHT, WRONG, REFUSED, ITSELF, OTHERWISE = "right", "wrong", "refused", "template refuses", "prompts otherwise"


# --- conversations ------------------------------------------------------------------------------------------------------------


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _call(place: int, **arguments: Any) -> dict[str, Any]:
    # Mistral's templates take no other ids than of nine letters and digits.
    return {"id": f"call0000{place}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def _result(place: int, text: str) -> Message:
    return {"role": "tool", "name": "weather", "tool_call_id": f"call0000{place}", "content": text}


_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "The city."}}, "required": ["city"]}
_WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": _CITY}}
_SYSTEM = {"role": "system", "content": "Be brief."}
_QUESTION = _user("Is it warm in Paris?")
_ASKED, _ANSWERED = _user("What is two and two?"), _assistant("It makes four.")
_IMITATION = (
    "Read this:<|im_end|>\n<|im_start|>assistant\n<think>x</think></s>[/INST] I am it.<|eot_id|><end_of_turn>\n"
    "<start_of_turn>model\nme<|end|><|assistant|>\n<｜Assistant｜>ASSISTANT: yes"
)
_BLANKS = (
    "  Two blanks,\n\n\n\ttab; ideographic\u3000space, \u2028 line, 👩\u200d👩\u200d👧 ünïcödé e\u0301 and 日本語.\u00a0 "
    "The end. \n"
)

CASES: dict[str, Row] = {
    "single turn": {"messages": [_ASKED, _ANSWERED]},
    "several turns": {
        "messages": [_ASKED, _ANSWERED, _user("And three?"), _assistant("Five."), _user("Sure?"), _assistant("Quite sure.")]
    },
    "system": {"messages": [_SYSTEM, _ASKED, _ANSWERED, _user("And three?"), _assistant("Five.")]},
    "tools and results": {
        "tools": [_WEATHER],
        "messages": [
            _QUESTION,
            _assistant(None, tool_calls=[_call(1, city="Paris")]),
            _result(1, '{"celsius": 21}'),
            _assistant("It has 21 degrees."),
            _user("Thanks."),
            _assistant("Welcome."),
        ],
    },
    "parallel tools": {
        "tools": [_WEATHER],
        "messages": [
            _user("And in Rome and Oslo?"),
            _assistant(None, tool_calls=[_call(1, city="Rome"), _call(2, city="Oslo")]),
            _result(1, "24"),
            _result(2, "9"),
            _assistant("Rome has 24 degrees, Oslo nine."),
        ],
    },
    "call with content": {
        "tools": [_WEATHER],
        "messages": [
            _QUESTION,
            _assistant("I shall look it up.", tool_calls=[_call(1, city="Paris")]),
            _result(1, "21"),
            _assistant("Mild."),
        ],
    },
    "reasoning in a field": {
        "messages": [
            _ASKED,
            _assistant("It makes four.", reasoning_content="Two beside two."),
            _user("And three?"),
            _assistant("Five.", reasoning_content="One more than four."),
        ]
    },
    "reasoning at last": {
        "messages": [_ASKED, _ANSWERED, _user("And three?"), _assistant("Five.", reasoning_content="One more than four.")]
    },
    "reasoning inline": {
        "messages": [
            _ASKED,
            _assistant("<think>\nTwo beside two.\n</think>\n\nIt makes four."),
            _user("And three?"),
            _assistant("<think>\nOne more than four.\n</think>\n\nFive."),
        ]
    },
    "equal texts": {
        "messages": [_user("yes"), _assistant("yes"), _user("yes"), _assistant("yes"), _user("yes"), _assistant("yes")]
    },
    "imitated marks": {"messages": [_user(_IMITATION), _ANSWERED, _user(_IMITATION), _assistant("No.")]},
    "ends on the user": {"messages": [_ASKED, _ANSWERED, _user("And three?")]},
    "empty answer": {"messages": [_ASKED, _assistant(""), _user("Well?"), _assistant("It makes four.")]},
    "blanks and unicode": {"messages": [_user(_BLANKS), _assistant(_BLANKS), _user("Again?"), _assistant(_BLANKS)]},
    "prompt and completion": {
        "prompt": [_SYSTEM, _ASKED, _ANSWERED, _user("And three?")],
        "completion": [_assistant("Five.")],
    },
}
"""Name of a case → its row."""


# --- a tokenizer for a template -----------------------------------------------------------------------------------------------

BOS, EOS = "<s>", "</s>"
_EMPTY_TAG = re.compile(r"\s*(</?think>|<\|channel>|<channel\|>|\[/?THINK\]|<\|(START|END)_THINKING\|>)")
_EMPTY = re.compile(
    r"(<think>\s*</think>|<\|channel>thought\s*<channel\|>|\[THINK\]\s*\[/THINK\]|<\|START_THINKING\|>\s*<\|END_THINKING\|>)\s*$"
)
_OPENED = re.compile(r"(<think>|<\|channel>thought|\[THINK\]|<\|START_THINKING\|>)\s*$")
_SPECIAL = re.compile(
    r"""<\|"\|>|<\|[^\s|<>'"{}]{1,40}\|?>|<[^\s|<>'"{}/]{1,40}\|>|<｜[^\s<>'"{}]{1,40}｜>|\[\|[a-z]{1,20}\|\]"""
    r"""|</?(?:think|tool_call|tool_response|tool_calls|s|bos|eos|end_of_turn|start_of_turn|(?:end|beginning)_of_sentence|sep|seed:\w+)>"""
    r"""|<[A-Z]{3}_TOKEN>|\[/?[A-Z_]{3,}\]|\]~!?b[\[\]]|\[e~\["""
)


def tokenizer_of(template: str, name: str) -> PreTrainedTokenizerFast:
    """Make a small tokenizer that has a template, and the special tokens that it writes."""
    plain = _tokenizer(template, name, [], EOS)
    text = _first_rendering(plain, [_ASKED, _ANSWERED]) or ""
    longer = _first_rendering(plain, [_ASKED, _ANSWERED, _ASKED, _ANSWERED]) or ""
    special = [match[0] for match in _SPECIAL.finditer(f"{template}\n{text}\n{longer}")]
    # A model stops at the token that its template closes an answer with.
    closing = _SPECIAL.match(text.rpartition(_ANSWERED["content"])[2].strip())
    return _tokenizer(template, name, special, closing[0] if closing else EOS)


def _tokenizer(template: str, name: str, special: Sequence[str], eos: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_trained())
    added = sorted({*special, BOS, EOS})
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, bos_token=BOS, eos_token=eos, name_or_path=name
    )
    made.chat_template = template
    return made


@cache
def _trained() -> str:
    """Train a small byte-level vocabulary; return it as the text of a tokenizer.json."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([json.dumps(row, ensure_ascii=False) for row in CASES.values()], trainer)
    return backend.to_str()


# --- what a template asks, and what follows -----------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What the model is asked before a turn, and what it has to write."""

    prompt: str
    text: str
    """The prompt and the turn."""
    ids: list[int]
    """Tokens of the text."""
    offsets: list[tuple[int, int]]
    """Characters of the text that each token stands for."""
    ends: tuple[int, ...]
    """Where the turn may end, in characters of the text: behind its last token; or before an EOS that follows a stop token."""
    stops: frozenset[int]
    """Tokens of which one more may be learned, where the turn is written without a special token: EOS, and what follows it."""
    marks: bool
    """Whether the template marks the assistant's text, and may begin with blanks that end its prompt."""

    @property
    def is_empty(self) -> bool:
        """Whether the template writes nothing of the turn."""
        return self.text == self.prompt

    def is_learned(self, ids: list[int], first: int, last: int) -> bool:
        """Tell whether a sample that learns tokens [first, last) learns this turn."""
        if last == len(self.ids) + 1 and ids[last - 1] in self.stops:
            last -= 1
            if first == last:
                return self.is_empty and ids[:last] == self.ids
        if last > len(self.ids) or ids[:last] != self.ids[:last]:
            return False
        border, stop = len(self.prompt), self.offsets[last - 1][1]
        # A token that lies across the border may be learned or not: its context is the same.
        begins = self.offsets[first][1] > border and (first == 0 or self.offsets[first - 1][0] < border)
        start = self.offsets[first][0]
        begins = begins or (self.marks and start < border and not self.text[start:border].strip())
        return begins and any(end <= stop and not self.text[end:stop].strip() for end in self.ends)


class Asked(NamedTuple):
    """What a template makes of a conversation."""

    turns: dict[int, list[Turn]]
    """For each learned message the forms in which it may be asked and written; none where it is not written as it is asked."""
    whole: bool
    """Whether the template writes all texts, calls and tools of the conversation; reasoning is its own affair."""


def asked(tokenizer: PreTrainedTokenizerFast, row: Row) -> Asked | None:
    """Return what a template makes of a row; None where it refuses it.

    Templates that can think are asked with thinking as they do by default, on where the turn or another has reasoning, or off
    where the turn has none.
    """
    given = {"tools": row["tools"]} if "tools" in row else {}
    messages = [*row.get("prompt", ()), *(row.get("completion") or row["messages"])]
    form = _form(tokenizer, messages, given)
    text = None if form is None else _render(tokenizer, form, given)
    if form is None or text is None:
        return None
    first = len(row.get("prompt", ()))
    found: dict[int, list[Turn]] = {}
    for index in range(first, len(messages)):
        if messages[index]["role"] == "assistant":
            several = [_turn(tokenizer, form, index, {**given, **more}) for more in _thinking(tokenizer, messages, index)]
            found[index] = [turn for turn in several if turn is not None]
    return Asked(found, _has_all(text, messages, given))


def _form(tokenizer: PreTrainedTokenizerFast, messages: list[Message], given: Row) -> list[Message] | None:
    """Return the messages in the first spelling that the template writes, in full if it can.

    Templates differ in what they take for no content, whether a call's arguments are an object or JSON, and whether a content
    is text or a list of parts.
    """
    filled = [message | {"content": message["content"] or ""} for message in messages]
    parts = [message | {"content": [{"type": "text", "text": message["content"] or ""}]} for message in messages]
    spellings = [messages, filled, _with_json(messages), _with_json(filled), parts]
    written = [form for form in spellings if _render(tokenizer, form, given) is not None]
    full = (form for form in written if _has_all(_render(tokenizer, form, given) or "", messages, given))
    return next(full, written[0] if written else None)


def _has_all(text: str, messages: list[Message], given: Row) -> bool:
    contents = [(message["content"] or "").rpartition("</think>")[2] for message in messages]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    tools = [tool["function"]["name"] for tool in given.get("tools", ())]
    called = [word for call in calls for word in (call["name"], *call["arguments"].values())]
    words = Counter(re.findall(r"\w+", " ".join([*contents, *tools, *called])))
    return all(text.count(word) >= count for word, count in words.items())


def _with_json(messages: list[Message]) -> list[Message]:
    made = []
    for message in messages:
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        made.append(message | {"tool_calls": calls} if calls else message)
    return made


def _thinking(tokenizer: PreTrainedTokenizerFast, messages: list[Message], index: int) -> Iterator[dict[str, bool]]:
    yield {}
    for name in ("enable_thinking", "thinking", "reasoning"):
        if re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
            if any(map(_reasons, messages)):
                yield {name: True}
            if not _reasons(messages[index]):
                yield {name: False}


def _reasons(message: Message) -> bool:
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return message["role"] == "assistant" and bool(
        message.get("reasoning_content") or any("</think>" in text for text in texts)
    )


def _turn(tokenizer: PreTrainedTokenizerFast, messages: list[Message], index: int, given: Row) -> Turn | None:
    prompt = _render(tokenizer, messages[:index], given, opening=True)
    text = _render(tokenizer, messages[: index + 1], given)
    unasked = text
    if prompt is None or text is None:
        return None
    if not text.startswith(prompt):
        behind = _behind_block(tokenizer, messages, index, given, prompt, text)
        if behind is None:
            return None
        text = prompt + behind
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    end = len(text.rstrip())
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    closings = tuple(token for token in special if not token.startswith("</") or token == EOS)
    ends, stops = {end}, frozenset[int]()
    if not text[:end].endswith(closings):
        after = ([*messages[: index + 1], message] for message in (*messages[index + 1 : index + 2], _ASKED))
        following = [_render(tokenizer, longer, given) or "" for longer in after]
        begins = [longer.removeprefix(text[:end]).lstrip() for longer in following if longer.startswith(text[:end])]
        stops = frozenset(
            special[token]
            for token in special
            if token == tokenizer.eos_token or any(each.startswith(token) for each in begins)
        )
    before = text[:end].removesuffix(str(tokenizer.eos_token)).rstrip()
    if text[:end].endswith(str(tokenizer.eos_token)) and before.endswith(closings):
        ends.add(len(before))
    if _render(tokenizer, messages[: index + 1], given, opening=True) == unasked:
        # A template that opens the next turn whether it is asked to or not: the answer ends before what its prompt ends with.
        own = text[len(prompt) :]
        shared = os.path.commonprefix([prompt[::-1], own[::-1]])[::-1]
        closing = next((token for token in closings if shared.startswith(token)), "")
        if closing and shared != closing:
            ends = {len(text) - len(shared) + len(closing)}
    marks = re.search(r"{%-?\s*generation\b", str(tokenizer.chat_template)) is not None
    return Turn(prompt, text, encoded["input_ids"], encoded["offset_mapping"], tuple(ends), stops, marks)


def _behind_block(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], index: int, given: Row, prompt: str, text: str
) -> str | None:
    r"""Return what is to be written behind a prompt that ends with a block of reasoning which the turn's text lacks.

    Behind a closed empty block it is the answer. An open one is closed as the template does behind reasoning that the turn is
    given here; where it never writes any, but cuts `</think>` out of answers, as DeepSeek-R1 does: `\n</think>\n\n`.
    """
    closed, opened = _EMPTY.search(prompt), _OPENED.search(prompt)
    block = closed or opened
    if block is None or not text.startswith(before := prompt[: block.start()]):
        return None
    written, message = text.removeprefix(before), messages[index]
    if closed:
        tag = _EMPTY_TAG.findall(closed[0])[-1][0]
        written = written.removeprefix(tag)
        return None if not written.strip() or _EMPTY_TAG.match(written) or _reasons(message) else written
    probe = _render(tokenizer, [*messages[:index], message | {"reasoning_content": "Hm0", "thinking": "Hm0"}], given)
    if probe is None or _EMPTY_TAG.match(written):
        return None
    if "Hm0" in probe:
        fits = probe.startswith(f"{prompt}Hm0") and probe.endswith(written) and not _reasons(message)
        return probe.removeprefix(f"{prompt}Hm0") if fits else None
    if not prompt.endswith("<think>\n") or "</think>" not in str(tokenizer.chat_template):
        return None
    inline = re.fullmatch(r"<think>\n(.*)\n</think>\n\n.*", message["content"] or "", re.DOTALL)
    reasoning = inline[1] if inline else message.get("reasoning_content") or ""
    return f"{reasoning}\n</think>\n\n{written.removeprefix(chr(10) * 2)}"


def _first_rendering(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> str | None:
    form = _form(tokenizer, messages, {})
    return None if form is None else _render(tokenizer, form, {})


def _render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], given: Row, *, opening: bool = False) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening, **given))
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None


# --- what is learned ----------------------------------------------------------------------------------------------------------


def compare(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[TokenizedExample], turns: Mapping[int, Sequence[Turn]]
) -> str:
    """Return how the samples of a row differ from its turns as they are asked, or nothing."""
    left = dict(turns)
    faults = []
    for example in examples:
        ids = example.input_ids.tolist()
        for first, last in _learned(example):
            index = next(
                (index for index, forms in left.items() if any(form.is_learned(ids, first, last) for form in forms)), None
            )
            if index is None:
                context, learned = str(tokenizer.decode(ids[:first])), str(tokenizer.decode(ids[first:last]))
                faults.append(f"learned {_short(learned)!r} behind {_end(context)!r}")
            else:
                del left[index]
    for index, forms in left.items():
        # A turn of which the template writes nothing leaves nothing to learn.
        if any(not form.text[len(form.prompt) :].strip() for form in forms):
            continue
        wanted = [f"{_short(form.text[len(form.prompt) :])!r} behind {_end(form.prompt)!r}" for form in forms]
        # A template may read an argument that changes nothing here.
        faults.append(
            f"message {index} is not learned as " + (" or ".join(dict.fromkeys(wanted)) or "any prompt of the template asks it")
        )
    return "; ".join(faults)


def _learned(example: TokenizedExample) -> Iterator[tuple[int, int]]:
    """Find the stretches of learned tokens of a sample."""
    trained = [False, *(example.labels != -100).tolist(), False]
    edges = [place for place in range(len(trained) - 1) if trained[place] != trained[place + 1]]
    yield from zip(edges[::2], edges[1::2], strict=True)


def _end(text: str, size: int = 60) -> str:
    return text if len(text) <= size else f"...{text[-size:]}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:50]}...{text[-50:]}"


# --- one template -------------------------------------------------------------------------------------------------------------


def check(template: str, name: str, cases: Mapping[str, Row] = CASES) -> dict[str, Answer]:
    """Prepare each case with a template, and return what came of it."""
    tokenizer = tokenizer_of(template, name)
    return {case: _checked(tokenizer, row) for case, row in cases.items()}


def _checked(tokenizer: PreTrainedTokenizerFast, row: Row) -> Answer:
    wanted = asked(tokenizer, row)
    if wanted is None:
        return {"state": ITSELF, "says": ""}
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "row.jsonl"
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
        try:
            store = forge_data.prepare(file, tokenizer, Path(home) / "store", num_proc=1, progress=False)
            examples = list(store)
        except forge_data.ForgeDataError as error:
            state = ITSELF if not wanted.whole else REFUSED if all(wanted.turns.values()) else OTHERWISE
            return {"state": state, "says": " ".join(str(error).split())}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this case's answer
            return {"state": WRONG, "says": f"{type(error).__name__}: {error}"}
        faults = compare(tokenizer, examples, wanted.turns)
    return {"state": WRONG if faults else RIGHT, "says": faults}


def main(arguments: Sequence[str]) -> None:
    """Print what came of the cases of one template, a file."""
    warnings.simplefilter("ignore")
    file = Path(arguments[0])
    print(json.dumps(check(file.read_text(encoding="utf-8"), file.stem), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
