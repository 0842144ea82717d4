"""One row, as read, as a sample and as tokens → findings.

It runs in the workers that tokenise, so it must cost next to nothing where nothing is wrong: each text is searched once for the
characters that problems begin with, and examined further only where one is found.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forge_data._errors import TokenizerError
from forge_data._media import MANY, MARKS, Media
from forge_data._options import Options
from forge_data.findings._finding import STOP, WARN, Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._samples import Chat, Document, Encoded, Pieces, Sample, Text
from forge_data.linting._sides import Side, note_findings, sides
from forge_data.linting._special_tokens import Occurrence, SpecialTokens
from forge_data.linting._tokens import TokenLint
from forge_data.linting._tools import tool_findings
from forge_data.linting._turns import ChatView, learned_turns, texts_of, turn_findings
from forge_data.linting._unicode import SUSPECTS, find_broken
from forge_data.media._load import load_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# First letters of the roles of a conversation as it should be.
_ALTERNATES = re.compile("[sd]?(?:ua)+").fullmatch


class RowLint:
    """Linter of single rows; each worker makes one."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: Options) -> None:
        self._tokenizer = tokenizer
        self._train_on, self._media = options.train_on, options.media
        self._special = SpecialTokens(tokenizer)
        self._tokens = TokenLint(tokenizer)
        self._suspect = re.compile(f"[{SUSPECTS}{re.escape(self._special.firsts)}]")

    def check(self, where: Where, fields: Fields, sample: Sample, encoded: Encoded | None, field_of: FieldOf) -> list[Finding]:
        """Find what is wrong with a row.

        Args:
            where: the row.
            fields: its fields.
            sample: the sample that it became.
            encoded: the examples that the sample became, before they were cut to length; None if it was refused.
            field_of: how its format names fields.
        """
        findings: list[Finding] = []
        for side in sides(sample):
            match side.sample:
                case Chat() as chat if not self._is_clean(chat):
                    first = chat.first_completion if side.second else 0
                    learned = learned_turns(chat, self._train_on)
                    findings += self._chat(ChatView(where, fields, chat, side.answer, first, side.wanted, learned, field_of))
                case Text() as text:
                    names = [field_of(fields, index, "", side.answer) for index in (0, 1)]
                    findings += self._prompt_and_answer(where, text, side, *names)
                case Pieces(bare=False) as pieces:
                    names = [field_of(fields, index, "", side.answer) for index in (0, 1)]
                    prompt, answer = pieces.texts
                    findings += self._prompt_and_answer(where, Text(pieces.place, prompt, answer), side, *names)
                case Pieces() as pieces:
                    findings += self._segments(where, [field_of(fields, at, "", "") for at in range(len(pieces.texts))], pieces)
                case Document() as document:
                    name = field_of(fields, 0, "", "")
                    findings += self._marks(where, name, document.text, ())
                    findings += self._text(where, name, document.text, rendered=True)
                case _:
                    pass
        if encoded is not None:
            findings += self._tokens.check(where, fields, sample, encoded, field_of)
            findings += note_findings(where, fields, sides(sample), encoded.notes, field_of) if encoded.notes else ()
        return findings

    def _marks(self, where: Where, field: str, text: str, media: Sequence[Media]) -> Iterator[Finding]:
        """Find the marks of kinds of media of which the row has none."""
        for kind, mark in MARKS.items() if self._media else ():
            if mark in text and kind not in {medium.kind for medium in media} and not self._is_of_media(mark):
                yield found(f"{kind}_mark_in_text", where, field, f"the text holds {mark}, and the row has no {MANY[kind]}")

    def _is_of_media(self, token: str) -> bool:
        return self._tokenizer.convert_tokens_to_ids(token) in self._media_tokens

    @cached_property
    def _media_tokens(self) -> frozenset[int]:
        """Tokens of media, and of a template's placeholders; loaded once a text needs them."""
        try:
            processor = load_processor(self._tokenizer.name_or_path, self._tokenizer)
        except TokenizerError:
            return frozenset()  # a model that takes no media, or none that can be loaded: rows with media are refused
        written: set[Any] = {self._tokenizer.convert_tokens_to_ids(text) for text in processor.placeholders.values()}
        return processor.token_ids | (written - {None, self._tokenizer.unk_token_id})

    def _is_clean(self, chat: Chat) -> bool:
        """Check quickly whether no rule for conversations can find anything, as in most rows."""
        messages = chat.messages
        if not _ALTERNATES("".join([message["role"][0] for message in messages])):
            return False
        trouble = self._suspect.search
        for message in messages:
            content = message["content"]
            if len(message) != 2 or not isinstance(content, str) or not content or content.isspace() or trouble(content):
                return False
            if ":" in content and message["role"] == "assistant":
                return False
        return True

    def _chat(self, view: ChatView) -> Iterator[Finding]:
        yield from turn_findings(view)
        if view.chat.tools or any("tool_calls" in message or message["role"] == "tool" for message in view.chat.messages):
            yield from tool_findings(view)
        for index in range(view.first, len(view.chat.messages)):
            learned = view.wanted and view.learned[index]
            for part, text in texts_of(view.chat.messages[index]):
                if "<" in text:  # the name of the field costs more than the search
                    yield from self._marks(view.where, view.field(index, part), text, view.chat.media)
                # Searched here too, since the name of the field costs more than the search.
                if self._suspect.search(text):
                    yield from self._text(view.where, view.field(index, part), text, learned=learned)

    def _prompt_and_answer(self, where: Where, text: Text, side: Side, prompt: str, answer: str) -> Iterator[Finding]:
        if not text.completion.strip():
            yield found("empty_turn", where, answer, "the completion is empty", severity=STOP if side.wanted else WARN)
        for field, said in ((prompt, "" if side.second else text.prompt), (answer, text.completion)):
            yield from self._marks(where, field, said, text.media)
            yield from self._text(where, field, said, rendered=True)

    def _segments(self, where: Where, fields: list[str], pieces: Pieces) -> Iterator[Finding]:
        """Find broken text; special tokens are meant where nothing else writes them."""
        for field, text in zip(fields, pieces.texts, strict=True):
            broken = find_broken(text)
            if broken:
                yield found("broken_unicode", where, field, broken.what, severity=STOP if broken.surrogate else WARN)

    def _text(self, where: Where, field: str, text: str, *, learned: bool = False, rendered: bool = False) -> Iterator[Finding]:
        """Find what is wrong in the text of one field.

        Args:
            where: the row.
            field: name of the field.
            text: its text.
            learned: it is an answer in a conversation, whose turn end the template writes.
            rendered: it is the whole text, so turn marks at its ends are meant.
        """
        if not self._suspect.search(text):
            return
        broken = find_broken(text)
        if broken:
            yield found("broken_unicode", where, field, broken.what, severity=STOP if broken.surrogate else WARN)
        marks = self._special.find(text)
        special = [each for each in marks if each.special]
        of_media = next((each.token for each in special if self._media and self._is_of_media(each.token)), None)
        if not marks or (rendered and of_media is None and _at_the_edges(text, marks)):
            return
        if special:
            worst = next((each for each in special if each.turns), special[0])
            more = f" and {len(special) - 1} more" if len(special) > 1 else ""
            what = (
                f"the text holds {worst.token!r} (at character {worst.start}{more}), which the tokenizer reads as a special "
                "token"
            )
            if of_media is not None:
                what = (
                    f"the text holds {of_media!r}, which stands for a part of a medium of this model: it would be given one of "
                    "another row"
                )
            stops = of_media is not None or (learned and worst.turns)
            yield found("special_token_in_text", where, field, what, severity=STOP if stops else WARN)
        foreign = next((each for each in marks if not each.special), None)
        if foreign:
            yield found("foreign_markup", where, field, f"the text holds {foreign.token!r} at character {foreign.start}")


def _at_the_edges(text: str, marks: list[Occurrence]) -> bool:
    """Tell whether marks open or close a text, as they do where it was rendered."""
    return not text[: marks[0].start].strip() or not text[marks[-1].stop :].strip()
