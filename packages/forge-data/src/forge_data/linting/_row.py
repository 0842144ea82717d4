"""One row, as read, as understood and as tokenised, to its findings.

It runs in the workers that tokenise, so it has to cost next to nothing where nothing is wrong: each text is searched once for
the characters that trouble begins with, and looked at closely only where one is found.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_data._options import Options
from forge_data.findings._finding import STOP, WARN, Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._samples import Chat, Document, Encoded, Sample, Text
from forge_data.linting._sides import Side, noted, sides
from forge_data.linting._special_tokens import SpecialText, Written
from forge_data.linting._tokens import TokenLint
from forge_data.linting._tools import tool_findings
from forge_data.linting._turns import View, learned_turns, texts_of, turn_findings
from forge_data.linting._unicode import SUSPECTS, broken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# First letters of the roles of a conversation as it should be.
_ALTERNATES = re.compile("[sd]?(?:ua)+").fullmatch


class RowLint:
    """Looks at rows one at a time; one is made per worker."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: Options) -> None:
        self._train_on = options.train_on
        self._special = SpecialText(tokenizer)
        self._tokens = TokenLint(tokenizer)
        self._suspect = re.compile(f"[{SUSPECTS}{re.escape(self._special.firsts)}]")

    def check(self, file: str, row: int, fields: Mapping[str, Any], sample: Sample, encoded: Encoded | None) -> list[Finding]:
        """What is wrong with a row; `encoded` is what became of it before anything was cut to length, None if nothing did."""
        where = Where(file, row, sample.place)
        findings: list[Finding] = []
        for side in sides(sample):
            match side.sample:
                case Chat() as chat if not self._sound(chat):
                    first = chat.first_completion if side.second else 0
                    learned = learned_turns(chat, self._train_on)
                    findings += self._chat(View(where, fields, chat, side.answer, first, side.wanted, learned))
                case Text() as text:
                    # Without a prompt of its own, it is what both answers begin with.
                    prompt = "prompt" if "prompt" in fields else side.answer
                    findings += self._text(where, prompt, text, side)
                case Document() as document:
                    name = "document" if "document" in fields and "text" not in fields else "text"
                    findings += self._words(where, name, document.text, rendered=True)
                case _:
                    pass
        if encoded is not None:
            findings += self._tokens.check(where, sample, encoded)
            findings += noted(where, fields, sides(sample), encoded.notes) if encoded.notes else ()
        return findings

    def _sound(self, chat: Chat) -> bool:
        """A quick look: true only where none of the rules for conversations has anything to say, as in most rows."""
        messages = chat.messages
        if not _ALTERNATES("".join([message["role"][0] for message in messages])):
            return False
        trouble = self._suspect.search
        for message in messages:
            content = message["content"]
            if len(message) != 2 or not content or content.isspace() or trouble(content):
                return False
            if ":" in content and message["role"] == "assistant":
                return False
        return True

    def _chat(self, view: View) -> Iterator[Finding]:
        yield from turn_findings(view)
        if view.chat.tools or any("tool_calls" in message or message["role"] == "tool" for message in view.chat.messages):
            yield from tool_findings(view)
        for index in range(view.first, len(view.chat.messages)):
            learned = view.wanted and view.learned[index]
            for part, text in texts_of(view.chat.messages[index]):
                # Asked here too, for the name of the field costs more than the search.
                if self._suspect.search(text):
                    yield from self._words(view.where, view.field(index, part), text, learned=learned)

    def _text(self, where: Where, prompt: str, text: Text, side: Side) -> Iterator[Finding]:
        if not text.completion.strip():
            yield found("empty_turn", where, side.answer, "the completion is empty", severity=STOP if side.wanted else WARN)
        yield from self._words(where, prompt, "" if side.second else text.prompt, rendered=True)
        yield from self._words(where, side.answer, text.completion, rendered=True)

    def _words(
        self, where: Where, field: str, text: str, *, learned: bool = False, rendered: bool = False
    ) -> Iterator[Finding]:
        """What is wrong in the words of one field.

        Args:
            where: the row.
            field: where in the row they stand.
            text: the words.
            learned: they are an answer in a conversation, whose turn end the template writes.
            rendered: they are the whole text; who wrote them had no other way to say where turns begin and end.
        """
        if not self._suspect.search(text):
            return
        wrong = broken(text)
        if wrong:
            yield found("broken_unicode", where, field, wrong.what, severity=STOP if wrong.surrogate else WARN)
        written = self._special.find(text)
        if not written or (rendered and _at_the_edges(text, written)):
            return
        special = [each for each in written if each.special]
        if special:
            worst = next((each for each in special if each.turns), special[0])
            more = f" and {len(special) - 1} more" if len(special) > 1 else ""
            what = f"the text holds {worst.token!r} (at character {worst.start}{more}), which the tokenizer reads as a special token"
            yield found("special_token_in_text", where, field, what, severity=STOP if learned and worst.turns else WARN)
        foreign = next((each for each in written if not each.special), None)
        if foreign:
            yield found("foreign_markup", where, field, f"the text holds {foreign.token!r} at character {foreign.start}")


def _at_the_edges(text: str, written: list[Written]) -> bool:
    """Whether marks open or close a text, as they do where it was rendered."""
    return not text[: written[0].start].strip() or not text[written[-1].stop :].strip()
