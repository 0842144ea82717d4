"""Records to tokens and labels: reading, formats, chat templates, loss masks, lint, viewer, token store. No torch.

Names load on first use, so `import forge_data` costs nothing and brings in neither transformers nor datasets nor pyarrow.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_data._accounting import Accounting
    from forge_data._classes import check_classes
    from forge_data._errors import BadPairError, DataError, ForgeDataError, StoreError, TemplateError, TokenizerError
    from forge_data._example import TokenizedExample
    from forge_data._findings import Finding, LintReport
    from forge_data._lint import lint
    from forge_data._prepare import prepare
    from forge_data._prompts import Prompt, PromptStore
    from forge_data._prompts_prepare import prepare_prompts
    from forge_data._settings import DataSettings, PreferenceDataSettings, PretrainDataSettings, PromptDataSettings
    from forge_data._show import show
    from forge_data._stats import Stats, stats
    from forge_data._store import TokenStore
    from forge_data._tokenize import tokenize
    from forge_data._tokenizer import load_tokenizer

__version__ = "0.3.1"

__all__ = [
    "Accounting",
    "BadPairError",
    "DataError",
    "DataSettings",
    "Finding",
    "ForgeDataError",
    "LintReport",
    "PreferenceDataSettings",
    "PretrainDataSettings",
    "Prompt",
    "PromptDataSettings",
    "PromptStore",
    "Stats",
    "StoreError",
    "TemplateError",
    "TokenStore",
    "TokenizedExample",
    "TokenizerError",
    "check_classes",
    "lint",
    "load_tokenizer",
    "prepare",
    "prepare_prompts",
    "show",
    "stats",
    "tokenize",
]

_HOMES = {
    "Accounting": "_accounting",
    "BadPairError": "_errors",
    "DataError": "_errors",
    "DataSettings": "_settings",
    "Finding": "_findings",
    "ForgeDataError": "_errors",
    "LintReport": "_findings",
    "PreferenceDataSettings": "_settings",
    "PretrainDataSettings": "_settings",
    "Prompt": "_prompts",
    "PromptDataSettings": "_settings",
    "PromptStore": "_prompts",
    "Stats": "_stats",
    "StoreError": "_errors",
    "TemplateError": "_errors",
    "TokenStore": "_store",
    "TokenizedExample": "_example",
    "TokenizerError": "_errors",
    "check_classes": "_classes",
    "lint": "_lint",
    "load_tokenizer": "_tokenizer",
    "prepare": "_prepare",
    "prepare_prompts": "_prompts_prepare",
    "show": "_show",
    "stats": "_stats",
    "tokenize": "_tokenize",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
