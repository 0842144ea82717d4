"""Text → special tokens, and turn marks of other tokenizers, that are written out in it.

The tokenizer reads `<|im_end|>` in a user's text as the token that ends a turn. The ids stay as they are, since they must be
the ones that the model will get; so it is reported, not changed.
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
# Tokens that belong in an answer where the rows write reasoning or calls themselves.
_EXPECTED = re.compile(r"think|reason|tool|func|python|answer", re.IGNORECASE)
_BRACKETED = re.compile(r"<[^<>\n]{1,60}>|\[/?[A-Z_]{1,40}\]")


class Occurrence(NamedTuple):
    """A token or mark that a text writes out."""

    token: str
    start: int
    stop: int
    special: bool
    """True for a token of this tokenizer, false for a mark of another's."""
    turns: bool
    """Whether this tokenizer's BOS, EOS or chat template uses it."""


class SpecialTokens:
    """Search for the special tokens of one tokenizer and the turn marks of others."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = frozenset(token for token in tokens if token.strip())
        self._unbracketed = sorted(token for token in self._special if not _BRACKETED.fullmatch(token))
        template = tokenizer.chat_template
        source = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        ends = {tokenizer.bos_token, tokenizer.eos_token}
        self._turns = frozenset(token for token in self._special if token in ends or token in source)
        self.firsts = "".join(sorted({"<", "[", *(token[0] for token in self._unbracketed)}))
        """Characters that a token or mark begins with; a text without any of them holds none."""

    @cached_property
    def _tokens(self) -> "re.Pattern[str]":
        # Match the shape, then look into the set: tokenizers have up to thousands of special tokens.
        unbracketed = [re.escape(token) for token in sorted(self._unbracketed, key=len, reverse=True)]
        return re.compile("|".join([*unbracketed, _BRACKETED.pattern]))

    def find(self, text: str) -> list[Occurrence]:
        """List all in order, except tokens of reasoning and tools, which rows may write."""
        if not any(first in text for first in self.firsts):
            return []
        found = []
        for match in self._tokens.finditer(text):
            token = match[0]
            if (token in self._special or token in _MARKS) and not _EXPECTED.search(token):
                special = token in self._special
                found.append(Occurrence(token, match.start(), match.end(), special, token in self._turns))
        return found
