"""Row of one of Axolotl's prompt types → its prompt as text and its answer, tokenised apart.

The texts are those of Axolotl 0.18 (`prompters.py` and `prompt_strategies/`), and so is that prompt and answer are tokenised
each alone: no token lies across both, and the model is asked with the very ids that it learned behind.
"""

from collections.abc import Mapping
from functools import partial

import attrs

from forge_data._errors import DataError
from forge_data._formats import AXOLOTL, user_defined
from forge_data._values import describe, from_json, string
from forge_data.formats._format import Fields, Format
from forge_data.formats._samples import Pieces

_INSTRUCTION = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_RESPOND = ". Write a response that appropriately completes the request."
_ASKED_BY_USER = "Below is an instruction from a USER that describes a task"
_CONCISE = ". The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n"
# Axolotl has the two words the other way round without an input.
_CONCISE_ALONE = ". The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n"
_CONTEXT = "Use the following contextual information to concisely answer the question.\n"
_EXPLAIN = "Choose the answer that best answers the question. Explain your reasoning.\n"
_CHOOSE = "Choose the answer that best answers the question. Be concise in your response.\n\n"
_NOTHING_KNOWN = (
    "The context provided does not contain any information about your inquiry. "
    "Therefore, I'm unable to answer your question based on the given context."
)


@attrs.frozen
class _Style:
    """What stands around a system text, and around a question with and without an input."""

    system: str
    with_input: str
    alone: str


_INSTRUCT = _Style(
    "{system}\n\n",
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
)
_CHAT = _Style("SYSTEM: {system}\n", "USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:")
_CHATML = _Style(
    "<|im_start|>system\n{system}<|im_end|>\n",
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
)
_PHI = _Style(
    "<|system|>\n{system}<|end|>\n",
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
)
_STYLES = {"": _INSTRUCT, ":instruct": _INSTRUCT, ":chat": _CHAT, ":chatml": _CHATML, ":phi": _PHI}
_ORCA = _Style(
    "### System:\n{system}\n",
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
)
_MINI = _Style("", "", "### System:\n{system}\n\n### User:\n{instruction}\n\n### Response:\n")
_TLDR = "USER: Summarize the following article as a TL;DR.\n{instruction}\n"

_ALPACA = (_INSTRUCTION + _WITH_INPUT + _RESPOND, _INSTRUCTION + _RESPOND)
_NONE = ("", "")


@attrs.frozen(kw_only=True)
class _Type:
    """Where a type finds question and answer, and the text that it asks in."""

    asked: str = "instruction"
    """Field of the question, or a text with fields in braces."""
    answered: str = "output"
    """Field of the answer, or a text with fields in braces, or without any."""
    further: str = "input"
    """Field of the question's input, which a row may lack; empty where the type reads none."""
    said: tuple[str, str] = _ALPACA
    """System text of a question with an input, and of one without."""
    system: str = ""
    """Field of a system text of the row's own."""
    style: _Style = _INSTRUCT


def _styled(name: str, **of_type: object) -> dict[str, _Type]:
    """Return a type in each of the styles that Axolotl has behind a colon."""
    return {name + suffix: _Type(**of_type, style=style) for suffix, style in _STYLES.items()}  # type: ignore[arg-type]


_AS_CHAT = (_ASKED_BY_USER + _WITH_INPUT + _CONCISE, _ASKED_BY_USER + _CONCISE_ALONE)
TYPES: dict[str, _Type] = {
    **_styled("alpaca"),
    "alpaca_instruct": _Type(),
    "alpaca_instruct.load_no_prompt": _Type(said=_NONE),
    "alpaca_chat": _Type(style=_CHAT),
    "alpaca_chat.load_concise": _Type(said=_AS_CHAT, style=_CHAT),
    "alpaca_chat.load_no_prompt": _Type(said=_NONE, style=_CHAT),
    "alpaca_chat.load_qa": _Type(asked="question", answered="answer", further="", said=_AS_CHAT, style=_CHAT),
    "alpaca_chat.load_camel_ai": _Type(asked="message_1", answered="message_2", further="", said=_AS_CHAT, style=_CHAT),
    "alpaca_w_system": _Type(system="system", style=_CHAT),
    "alpaca_w_system.load_chat": _Type(system="system", style=_CHAT),
    "alpaca_w_system.load_instruct": _Type(system="system"),
    "alpaca_w_system.load_open_orca": _Type(
        asked="question", answered="response", further="", system="system_prompt", style=_ORCA
    ),
    "alpaca_w_system.load_open_orca_chatml": _Type(
        asked="question", answered="response", further="", system="system_prompt", style=_CHATML
    ),
    "orcamini": _Type(asked="question", answered="response", further="", system="system_prompt", style=_MINI),
    **_styled("gpteacher", answered="response"),
    **_styled("oasst", asked="INSTRUCTION", answered="RESPONSE", further=""),
    **_styled("jeopardy", asked="question", answered="what is {answer}", further="category"),
    **_styled("explainchoice", asked="question", answered="explanation", further="choices", said=(_EXPLAIN, _EXPLAIN)),
    "concisechoice": _Type(
        asked="question",
        answered="explanation",
        further="choices",
        said=(_CHOOSE, _CHOOSE),
        style=attrs.evolve(_CHAT, system="{system}"),
    ),
    "summarizetldr": _Type(
        asked="article", answered="summary", further="", said=_NONE, style=_Style("", "", _TLDR + "ASSISTANT:")
    ),
    "context_qa": _Type(
        asked="{article}\n===\n{question}", answered="answer", further="", said=(_CONTEXT, _CONTEXT), style=_CHAT
    ),
    "context_qa.load_404": _Type(
        asked="{article}\n===\n{unanswerable_question}",
        answered=_NOTHING_KNOWN,
        further="",
        said=(_CONTEXT, _CONTEXT),
        style=_CHAT,
    ),
    "context_qa.load_v2": _Type(
        asked="Context: {context}\nQuestion: {question}\n",
        answered="Answer: {answer}",
        further="",
        said=_NONE,
        style=_Style("", "", "{instruction}"),
    ),
}
"""Type of a data set in Axolotl → what it reads and writes; `input_output` beside them gives its own pieces."""


def named(name: str) -> Format:
    """Return the format of one of Axolotl's types, such as `axolotl:alpaca`."""
    kind = name.removeprefix(AXOLOTL)
    if (defined := user_defined(name)) is not None:
        return _defined(defined)
    if kind == "input_output":
        return Format(
            needs="segments",
            matches=lambda row: "segments" in row,
            convert=_segments,
            field_of=lambda _row, index, _part, _answer: f"segments[{index}].text",
            detected=False,
        )
    made = TYPES[kind]
    asked, answered = (_fields_of(text) for text in (made.asked, made.answered))
    needed = [*asked, *answered, *([made.system] if made.system else [])]
    return Format(
        needs=", ".join(needed),
        matches=lambda row: all(name in row or _instead(name, row) is not None for name in needed),
        convert=partial(_prompt_and_answer, made),
        field_of=lambda _row, index, _part, _answer: (asked, answered or asked)[min(index, 1)][0],
        reads=(made.system,) if made.system else (),
        detected=False,
    )


def _defined(own: Mapping[str, str]) -> Format:
    """Return the format of a type that is defined as in a file of Axolotl."""
    asked, answered = own["field_instruction"], own["field_output"]
    return Format(
        needs=", ".join(dict.fromkeys((asked, answered))),
        matches=lambda row: asked in row and answered in row,
        convert=partial(_as_defined, own),
        field_of=lambda _row, index, _part, _answer: (asked, answered)[min(index, 1)],
        reads=(own["field_system"], asked, own["field_input"], answered),
        detected=False,
    )


def _as_defined(own: Mapping[str, str], place: str, row: Fields) -> Pieces:
    """Read a row in the fields and texts of a type of one's own.

    A system text that is null or empty is none, and not the one for rows without that field.
    """
    texts = {
        part: string(place, name, row[name])
        for part in ("instruction", "input", "output", "system")
        if (name := own[f"field_{part}"]) in row
    }
    absent = "" if own["field_system"] in getattr(row, "nulls", ()) else own["system_prompt"]
    system, details = texts.get("system", absent), texts.get("input", "")
    before = own["system_format"].format(system=system) if system else ""
    around = own["format" if details else "no_input_format"]
    asked = around.format(instruction=texts["instruction"], **({"input": details} if details else {}))
    return Pieces(place, (before + asked, texts["output"]), (False, True))


def _fields_of(text: str) -> list[str]:
    """Return the fields that a text has in braces; a text that is one word is a field itself."""
    if "{" not in text:
        return [] if " " in text else [text]
    return [part.partition("}")[0] for part in text.split("{")[1:]]


def _instead(name: str, row: Fields) -> str | None:
    """Return the field that is read in place of another: of a choice's explanation its solution."""
    return "solution" if name == "explanation" and "solution" in row else None


def _prompt_and_answer(made: _Type, place: str, row: Fields) -> Pieces:
    """Read a row as the text that asks and the text that answers.

    Raises:
        DataError: a field that is not a string, or turns that came before, for which the text has no place.
    """
    if from_json(row.get("history")):
        raise DataError(
            f"{place}: field history is {describe(row['history'])}, and this prompt has no place for earlier turns; choose the "
            "format alpaca, which has, or take it out of the rows"
        )
    question, answer = _filled(place, made.asked, row), _filled(place, made.answered, row)
    details = _details(place, made.further, row) if made.further else ""
    system = string(place, made.system, row[made.system]) if made.system else made.said[not details]
    style = made.style
    around = style.with_input if details else style.alone
    before = style.system.format(system=system) if system else ""
    text = before + around.format(instruction=question, input=details, system=system)
    return Pieces(place, (text, answer), (False, True))


def _filled(place: str, text: str, row: Fields) -> str:
    fields = _fields_of(text)
    values = {name: string(place, at, row[at]) for name in fields for at in (_instead(name, row) or name,)}
    return values[text] if text in fields else text.format(**values)


def _details(place: str, name: str, row: Fields) -> str:
    value = row.get(name, "")
    if name == "choices" and isinstance(choices := from_json(value), list):
        return "\n".join(f'- "{string(place, f"choices[{at}]", each)}"' for at, each in enumerate(choices))
    return string(place, name, value)


def _segments(place: str, row: Fields) -> Pieces:
    """Read `segments`, each with a `text` and a `label`, true where it is learned.

    Raises:
        DataError: something else.
    """
    segments = from_json(row["segments"])
    if not isinstance(segments, list) or not segments:
        raise DataError(f"{place}: field segments is {describe(segments)}; it must be a list of objects with text and label")
    texts, learned = list[str](), list[bool]()
    for at, segment in enumerate(segments):
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool) or segment.keys() != {"text", "label"}:
            raise DataError(
                f"{place}: field segments[{at}] is {describe(segment)}; it must have a text, and a label true or false"
            )
        texts.append(string(place, f"segments[{at}].text", segment["text"]))
        learned.append(segment["label"])
    return Pieces(place, tuple(texts), tuple(learned), bare=True)
