"""Name → a chat template for models that have none, and the tokens that it writes.

The texts stand in `templates/`. A name is here where its text is one and public; Mistral's, of which versions differ in blanks,
is not, and models with a template of their own need none.
"""

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import attrs

from forge_data._errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.frozen
class NamedTemplate:
    """A template of `templates/`."""

    source: str
    """Where the text is published."""
    tokens: tuple[str, ...] = ()
    """Marks that must be one token each."""
    end: str | None = None
    """That of them which ends a turn; None where the tokenizer's EOS does."""
    special: tuple[str, ...] = ()
    """Special tokens of the tokenizer that it writes."""


CHAT_TEMPLATES = {
    "chatml": NamedTemplate(
        source="OpenAI's ChatML, as Axolotl and LLaMA-Factory write it: without a system message of its own",
        tokens=("<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
    ),
    "llama3": NamedTemplate(
        source="meta-llama/Meta-Llama-3-8B-Instruct",
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        special=("bos_token",),
    ),
    "gemma": NamedTemplate(
        source="google/gemma-7b-it and gemma-2, which have no system message",
        tokens=("<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        special=("bos_token",),
    ),
    "zephyr": NamedTemplate(source="HuggingFaceH4/zephyr-7b-beta, in alignment-handbook", special=("eos_token",)),
    "alpaca": NamedTemplate(
        source="tatsu-lab/stanford_alpaca, with a new line behind `### Response:` and an empty one between turns, as "
        "LLaMA-Factory writes it",
        special=("eos_token",),
    ),
}
"""Every name that `chat_template` may be for any tokenizer."""


def chat_templates() -> dict[str, NamedTemplate]:
    """List the names that `chat_template` may be for any tokenizer, each with what it is.

    >>> list(chat_templates())
    ['chatml', 'llama3', 'gemma', 'zephyr', 'alpaca']
    """
    return dict(CHAT_TEMPLATES)


@cache
def text_of(name: str) -> str:
    """Read the text of a named template."""
    return (resources.files("forge_data.tokenizing") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def named_template(name: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text of a named template for a tokenizer that has its tokens.

    Raises:
        TemplateError: the tokenizer lacks some, naming them and what adds them.
    """
    template = CHAT_TEMPLATES[name]
    lacking = [token for token in template.tokens if len(tokenizer.encode(token, add_special_tokens=False)) != 1]
    if lacking:
        bare = " or ".join(each for each, row in CHAT_TEMPLATES.items() if not row.tokens)
        raise TemplateError(
            f"`chat_template` {name} writes {' and '.join(lacking)}, which the tokenizer of this model does not have as "
            f"{'one token' if len(lacking) == 1 else 'one token each'}: add what is lacking as special tokens (forge: "
            f"add_special_tokens={lacking!r}), or take {bare}, which needs none"
        )
    absent = [token for token in template.special if getattr(tokenizer, token, None) is None]
    if absent:
        raise TemplateError(
            f"`chat_template` {name} writes the tokenizer's {' and '.join(absent)}, and it has none; name it in its "
            "tokenizer_config.json, or take another template"
        )
    return text_of(name)
