"""Tokenizer, chat template and its arguments → the same tokenizer with that template.

Arguments become the template's own defaults, so that whoever asks the model with this tokenizer asks it as it was trained.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data._errors import DataError, TemplateError
from forge_data._paths import expand_user
from forge_data._values import nearest, text_of_file
from forge_data.chat_template._template import GIVEN
from forge_data.chat_template._traced_jinja import compile_template
from forge_data.tokenizing._named_templates import CHAT_TEMPLATES, named_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Templates = str | dict[str, str]


def with_template(
    tokenizer: "PreTrainedTokenizerBase", chat_template: str | None, arguments: Mapping[str, Any] | None = None
) -> "PreTrainedTokenizerBase":
    """Return a copy of a tokenizer with another chat template or other default arguments.

    The tokenizer itself is returned where there is neither.

    Args:
        tokenizer: the tokenizer.
        chat_template: the name of one of the tokenizer's own templates or of `chat_templates`, or a file.
        arguments: values of arguments of the template, for rows that give none.

    Raises:
        TemplateError: no such template, one that is none, one whose tokens the tokenizer lacks, or one that reads no argument
            of that name.
    """
    if chat_template is None and not arguments:
        return tokenizer
    templates = _chosen(tokenizer, chat_template)
    made = copy.deepcopy(tokenizer)
    made.chat_template = _with_defaults(templates, arguments or {}, chat_template, tokenizer.special_tokens_map)
    if chat_template is not None:
        setattr(made, GIVEN, chat_template)
    return made


def arguments_read(
    tokenizer: "PreTrainedTokenizerBase", chat_template: str | None, arguments: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments that a chat template reads; none where the tokenizer has no template.

    Args:
        tokenizer: as for `with_template`.
        chat_template: as for `with_template`.
        arguments: as for `with_template`.

    Raises:
        TemplateError: as `with_template`, of the template itself.
    """
    if not arguments or not (chat_template or tokenizer.chat_template):
        return {}
    templates = _chosen(tokenizer, chat_template)
    sources = templates if isinstance(templates, dict) else {"": templates}
    known = {name for each, source in sources.items() for name in _reads(source, chat_template or each)}
    return {name: value for name, value in arguments.items() if name in known}


def _chosen(tokenizer: "PreTrainedTokenizerBase", chat_template: str | None) -> Templates:
    own: Templates | None = tokenizer.chat_template
    if chat_template is None:
        if not own:
            raise TemplateError(
                "`chat_template_kwargs` are for a chat template, and the tokenizer has none; give `chat_template`"
            )
        return own
    if isinstance(own, dict) and chat_template in own:
        return own[chat_template]
    if chat_template in CHAT_TEMPLATES:
        return named_template(chat_template, tokenizer)
    path: Path = expand_user(chat_template, DataError)
    try:
        return text_of_file(path)
    except (OSError, UnicodeDecodeError) as error:
        named = f"; the tokenizer's own are called {', '.join(own)}" if isinstance(own, dict) else ""
        raise TemplateError(
            f"`chat_template` is {chat_template!r}, which cannot be read as a file ({getattr(error, 'strerror', error)})"
            f"{named}; give a file of a Jinja template, or one of the names {', '.join(CHAT_TEMPLATES)}"
            f"{nearest(chat_template.lower(), CHAT_TEMPLATES, 0.6)}"
        ) from error


def _with_defaults(
    templates: Templates, arguments: Mapping[str, Any], chat_template: str | None, special: Mapping[str, Any]
) -> Templates:
    """Put the values of arguments before each template that reads them."""
    sources = templates if isinstance(templates, dict) else {"": templates}
    reads = {name: _reads(source, chat_template or name) for name, source in sources.items()}
    known = frozenset(name for names in reads.values() for name in names)
    for name in arguments:
        if name in special:
            raise TemplateError(
                f"`chat_template_kwargs` has {name!r}, which the tokenizer itself gives its template; leave it out, or "
                "change it in the tokenizer"
            )
        if name not in known:
            raise TemplateError(
                f"`chat_template_kwargs` has {name!r}, and the chat template reads no such argument{nearest(name, known)}; "
                "leave it out"
            )
    made = {
        name: "".join(_default(each, value) for each, value in arguments.items() if each in reads[name]) + source
        for name, source in sources.items()
    }
    return made if isinstance(templates, dict) else made[""]


def _reads(source: str, name: str) -> frozenset[str]:
    try:
        return compile_template(source)[1]
    except Exception as error:
        raise TemplateError(f"`chat_template`: {name or 'it'} is no Jinja template: {error}") from error


def _default(name: str, value: Any) -> str:
    # The newline is the tag's, so that the source begins as it does alone, with blanks and all.
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n"


def _literal(value: Any) -> str:
    r"""Write a JSON value as Jinja does.

    >>> _literal({"a": [None, True, 'say "x"']})
    '{"a": [none, true, "say \\"x\\""]}'
    """
    match value:
        case None:
            return "none"
        case Mapping():
            return "{" + ", ".join(f"{_literal(name)}: {_literal(item)}" for name, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_literal, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)
