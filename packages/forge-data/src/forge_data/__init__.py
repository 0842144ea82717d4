"""Records to tokens and labels: reading, formats, chat templates, loss masks, lint, viewer, token store. No torch.

Names load on first use, so `import forge_data` costs nothing and brings in neither transformers nor datasets nor pyarrow.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_data._accounting import Accounting
    from forge_data._errors import BadPairError, DataError, ForgeDataError, StoreError, TemplateError, TokenizerError
    from forge_data._example import TokenizedExample
    from forge_data._settings import DataSettings, PreferenceDataSettings, PretrainDataSettings, PromptDataSettings
    from forge_data.findings._report import Finding, LintReport
    from forge_data.linting._lint import lint
    from forge_data.preparing._prepare import prepare
    from forge_data.preparing._prepare_prompts import prepare_prompts
    from forge_data.preparing._tokenize import tokenize
    from forge_data.store._prompt_store import Prompt, PromptStore
    from forge_data.store._token_store import TokenStore
    from forge_data.store._token_store_from_classes import check_classes
    from forge_data.tokenizing._tokenizer import load_tokenizer
    from forge_data.viewing._show import show
    from forge_data.viewing._stats import Stats, stats

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
    "Finding": "findings._report",
    "ForgeDataError": "_errors",
    "LintReport": "findings._report",
    "PreferenceDataSettings": "_settings",
    "PretrainDataSettings": "_settings",
    "Prompt": "store._prompt_store",
    "PromptDataSettings": "_settings",
    "PromptStore": "store._prompt_store",
    "Stats": "viewing._stats",
    "StoreError": "_errors",
    "TemplateError": "_errors",
    "TokenStore": "store._token_store",
    "TokenizedExample": "_example",
    "TokenizerError": "_errors",
    "check_classes": "store._token_store_from_classes",
    "lint": "linting._lint",
    "load_tokenizer": "tokenizing._tokenizer",
    "prepare": "preparing._prepare",
    "prepare_prompts": "preparing._prepare_prompts",
    "show": "viewing._show",
    "stats": "viewing._stats",
    "tokenize": "preparing._tokenize",
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
