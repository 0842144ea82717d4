"""Directory or URL → the store there, of samples or of prompts."""

import os

from forge_data.store._fetch import local_directory
from forge_data.store._manifest import holds_prompts
from forge_data.store._prompt_store import PromptStore
from forge_data.store._token_store import TokenStore


def open_store(directory: str | os.PathLike[str]) -> TokenStore | PromptStore:
    """Open a store of either kind.

    Raises:
        StoreError: there is none.
    """
    place = local_directory(directory)
    return PromptStore.open(place) if holds_prompts(place) else TokenStore.open(place)
