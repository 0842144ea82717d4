"""Records → tokens and labels: formats, loss masks, lint, viewer, token store; no torch.

Names load on first use, so `import forge_data` costs nothing and brings in neither transformers nor datasets nor pyarrow.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_data._accounting import Accounting as Accounting
    from forge_data._errors import (
        BadPairError as BadPairError,
        DataError as DataError,
        ForgeDataError as ForgeDataError,
        StoreError as StoreError,
        TemplateError as TemplateError,
        TokenizerError as TokenizerError,
    )
    from forge_data._example import TokenizedExample as TokenizedExample
    from forge_data._media import Media as Media
    from forge_data._settings import (
        DataSettings as DataSettings,
        EmbedDataSettings as EmbedDataSettings,
        LabelledDataSettings as LabelledDataSettings,
        PreferenceDataSettings as PreferenceDataSettings,
        PretrainDataSettings as PretrainDataSettings,
        PromptDataSettings as PromptDataSettings,
    )
    from forge_data.aligning._answers import AnswerReader as AnswerReader, TaughtAnswer as TaughtAnswer
    from forge_data.aligning._spelling import Spelling as Spelling, shared_tokens as shared_tokens
    from forge_data.findings._finding import Finding as Finding
    from forge_data.findings._report import LintReport as LintReport
    from forge_data.formats._chat import messages_with_media as messages_with_media
    from forge_data.formats._format import Format as Format
    from forge_data.linting._lint import lint as lint
    from forge_data.media._inputs import MediaInputs as MediaInputs, Unexpanded as Unexpanded
    from forge_data.preparing._first_row import check_first_row as check_first_row
    from forge_data.preparing._merge import merge as merge
    from forge_data.preparing._prepare import prepare as prepare
    from forge_data.preparing._prepare_prompts import prepare_prompts as prepare_prompts
    from forge_data.preparing._prepare_taught import prepare_taught as prepare_taught
    from forge_data.preparing._prepare_text_pairs import prepare_text_pairs as prepare_text_pairs
    from forge_data.preparing._prepare_texts import prepare_labelled as prepare_labelled
    from forge_data.preparing._tokenize import tokenize as tokenize
    from forge_data.reading._memory import InMemoryRows as InMemoryRows
    from forge_data.store._prompt_store import Prompt as Prompt, PromptStore as PromptStore
    from forge_data.store._token_store import TokenStore as TokenStore, check_classes as check_classes
    from forge_data.tokenizing._add_tokens import AddedTokens as AddedTokens, add_tokens as add_tokens
    from forge_data.tokenizing._chat_template import with_template as with_template
    from forge_data.tokenizing._named_templates import chat_templates as chat_templates
    from forge_data.tokenizing._tokenizer import load_tokenizer as load_tokenizer
    from forge_data.tokenizing._turn_end import turn_end as turn_end
    from forge_data.tokenizing._turn_reader import TurnReader as TurnReader
    from forge_data.viewing._look import page_look as page_look
    from forge_data.viewing._show import show as show
    from forge_data.viewing._stats import Stats as Stats, stats as stats

__version__ = "0.3.2"

# Each module with the public names that it defines; a module is imported when one of its names is first used.
_PUBLIC = {
    "_accounting": "Accounting",
    "_errors": "BadPairError DataError ForgeDataError StoreError TemplateError TokenizerError",
    "_example": "TokenizedExample",
    "_media": "Media",
    "_settings": (
        "DataSettings EmbedDataSettings LabelledDataSettings PreferenceDataSettings PretrainDataSettings PromptDataSettings"
    ),
    "aligning._answers": "AnswerReader TaughtAnswer",
    "aligning._spelling": "Spelling shared_tokens",
    "findings._finding": "Finding",
    "findings._report": "LintReport",
    "formats._chat": "messages_with_media",
    "formats._format": "Format",
    "media._inputs": "MediaInputs Unexpanded",
    "linting._lint": "lint",
    "preparing._first_row": "check_first_row",
    "preparing._merge": "merge",
    "preparing._prepare": "prepare",
    "preparing._prepare_prompts": "prepare_prompts",
    "preparing._prepare_taught": "prepare_taught",
    "preparing._prepare_text_pairs": "prepare_text_pairs",
    "preparing._prepare_texts": "prepare_labelled",
    "preparing._tokenize": "tokenize",
    "reading._memory": "InMemoryRows",
    "store._prompt_store": "Prompt PromptStore",
    "store._token_store": "TokenStore check_classes",
    "tokenizing._add_tokens": "AddedTokens add_tokens",
    "tokenizing._chat_template": "with_template",
    "tokenizing._named_templates": "chat_templates",
    "tokenizing._tokenizer": "load_tokenizer",
    "tokenizing._turn_end": "turn_end",
    "tokenizing._turn_reader": "TurnReader",
    "viewing._look": "page_look",
    "viewing._show": "show",
    "viewing._stats": "Stats stats",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
