"""A tokenizer and strings → the tokenizer with each string as one token, and the new ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from forge_data._errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.frozen(kw_only=True)
class AddedTokens:
    """Tokens that `add_tokens` was given: their ids, and which of them are new."""

    ids: dict[str, int]
    """Token → its id, in the order given: ordinary tokens, then special ones."""
    known: tuple[str, ...]
    """Tokens that had an id before; they keep it."""

    @property
    def new(self) -> dict[str, int]:
        """Tokens that had no id before → their ids."""
        return {token: number for token, number in self.ids.items() if token not in self.known}


def add_tokens(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[str] = (), *, special: Sequence[str] = ()) -> AddedTokens:
    """Add tokens to `tokenizer`, in place: each of the strings is one token wherever it stands.

    Special tokens are left out where text is decoded with skip_special_tokens. A string that is a token already keeps its id.

    Raises:
        TokenizerError: the tokenizer does not read one of them as one token: its normalizer changes the text.
    """
    from transformers import AddedToken

    before = tokenizer.get_vocab()
    tokenizer.add_tokens(list(tokens))
    # Not special_tokens=True, which would also list them as the tokenizer's own (additional_special_tokens).
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ids = {}
    for token in (*tokens, *special):
        found = tokenizer.encode(token, add_special_tokens=False)
        if len(found) != 1:
            raise TokenizerError(
                f"the token {token!r} cannot be added: {tokenizer.name_or_path or type(tokenizer).__name__} reads it as "
                f"{len(found)} tokens ({' '.join(map(repr, tokenizer.convert_ids_to_tokens(found)))}), because its normalizer "
                "changes the text; write it as the normalizer leaves it, or add it as a special token"
            )
        ids[token] = int(found[0])
    return AddedTokens(ids=ids, known=tuple(token for token in ids if token in before))
