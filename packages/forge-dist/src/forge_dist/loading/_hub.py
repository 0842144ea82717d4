"""Name of a model → whether the Hugging Face Hub or its cache has it; loads no torch."""

import os
import threading
from pathlib import Path

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import is_hub_name

_SECONDS = 5.0
_REMEDY = (
    "give a local directory, set HF_HOME to a cache that holds the model, or try again once the network is there "
    "(HTTPS_PROXY for a proxy, HF_ENDPOINT for a mirror)"
)
"""What to do where the hub does not answer."""
_NAMED = 5
"""Most directories beside a missing one that a message names."""
_FILES = ("config.json", "adapter_config.json")


def check_hub_name(model_path: str, *, seconds: float = _SECONDS) -> None:
    """Check that a name of the form org/name can be had, before anything waits for it.

    A directory, a path, and what the hub's cache holds are fine as they are; nothing else is asked of the network than whether
    the hub has the model.

    Raises:
        ModelError: the hub has none of this name, or has not answered within so many seconds.
    """
    if not is_hub_name(model_path):
        return
    from huggingface_hub import is_offline_mode, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(model_path, name), str) for name in _FILES):
        return
    here = f"model_path {model_path!r}: there is no such directory here{_neighbours(model_path)}"
    if is_offline_mode():
        raise ModelError(
            f"{here}, and the Hub's cache does not hold this name, which HF_HUB_OFFLINE leaves as the only place; give a local "
            "directory, set HF_HOME to a cache that holds it, or unset HF_HUB_OFFLINE"
        )
    refused = _ask(model_path, seconds)
    if refused:
        raise ModelError(f"{here}, and {refused}")


def _ask(name: str, seconds: float) -> str:
    """Ask the hub for a model; return why it cannot be had, "" where it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    answers: list[str] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=seconds)
        except GatedRepoError:
            answers.append("the Hugging Face Hub has it behind a gate: accept its terms there, and log in with `hf auth login`")
        except RepositoryNotFoundError:
            answers.append("the Hugging Face Hub has no model of this name, or a private one (`hf auth login`)")
        except Exception as error:  # noqa: BLE001 - whatever the client and its libraries raise without a network
            reason = " ".join(str(error).split()) or type(error).__name__
            answers.append(f"the Hugging Face Hub cannot be reached ({reason[:200]}); {_REMEDY}")
        else:
            answers.append("")

    # Looking up a host's address has no time limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else f"the Hugging Face Hub has not answered within {seconds:g} s; {_REMEDY}"


def _neighbours(model_path: str) -> str:
    """Name what lies where the path would be, if its folder is here."""
    folder = Path(os.path.dirname(model_path))
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return ""
    more = ", ..." if len(names) > _NAMED else ""
    return f" ({folder}/ holds {', '.join(names[:_NAMED])}{more})" if names else ""
