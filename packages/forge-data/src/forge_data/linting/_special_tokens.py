"""A text to the special tokens and foreign turn marks that are written out in it.

The tokenizer reads `<|im_end|>` in a user's text as the token that ends a turn. The ids are what they are, for they must be the
ones that the model will get; so it is said, not mended.
"""

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Turn marks of other families that no prose, and hardly any code, holds. `</s>` is not among them, for it is HTML too.
_MARKS = frozenset(
    "<|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|begin_of_text|> <|end_of_text|> <|endoftext|> "
    "<start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|> <|eos|> <|endofprompt|> <|return|> <|channel|> "
    "<|start_of_role|> <|end_of_role|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <SYS> [INST] [/INST]".split()
)
# What stands in an answer by right where the rows write reasoning or calls out themselves.
_BY_RIGHT = re.compile(r"think|reason|tool|func|python|answer", re.IGNORECASE)
_BRACKETED = re.compile(r"<[^<>\n]{1,60}>|\[/?[A-Z_]{1,40}\]")


class Written(NamedTuple):
    """A token or mark that a text writes out."""

    token: str
    start: int
    stop: int
    special: bool
    """True for a token of this tokenizer, false for a mark of another's."""
    turns: bool
    """True if this tokenizer's BOS, EOS or chat template uses it."""


class SpecialText:
    """Finds them for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = frozenset(token for token in tokens if token.strip())
        self._loose = sorted(token for token in self._special if not _BRACKETED.fullmatch(token))
        template = tokenizer.chat_template
        written = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        ends = {tokenizer.bos_token, tokenizer.eos_token}
        self._turns = frozenset(token for token in self._special if token in ends or token in written)
        self.firsts = "".join(sorted({"<", "[", *(token[0] for token in self._loose)}))
        """The characters that a token or mark begins with; a text with none of them holds none."""

    @cached_property
    def _tokens(self) -> "re.Pattern[str]":
        # Shape first and then a look into a set: tokenizers have up to thousands of special tokens.
        loose = [re.escape(token) for token in sorted(self._loose, key=len, reverse=True)]
        return re.compile("|".join([*loose, _BRACKETED.pattern]))

    def find(self, text: str) -> list[Written]:
        """All of them, in order; tokens and marks for reasoning and tools are left to whoever wrote them."""
        if not any(first in text for first in self.firsts):
            return []
        written = []
        for match in self._tokens.finditer(text):
            token = match[0]
            if (token in self._special or token in _MARKS) and not _BY_RIGHT.search(token):
                special = token in self._special
                written.append(Written(token, match.start(), match.end(), special, token in self._turns))
        return written
