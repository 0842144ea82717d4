"""Export of a run → a repository on the Hugging Face Hub, private unless asked otherwise."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import ForgeError, PushError, SettingsError
from forge._redact import is_hub_form
from forge.exporting._model_card import model_card
from forge.exporting._request import ExportRequest, read_json
from forge.saving._hashes import events

SECONDS = 5.0
"""Longest wait for the Hub's first answer."""


def push(run: str | Path, repo: str, *, public: bool = False) -> str:
    """Upload a model to the Hugging Face Hub, with its model card.

    The repository is made, private, where there is none. A public one is written to only where that is asked for. All files go
    up in one commit.

    Args:
        run: A run directory (its last export), or a directory that `forge export` wrote.
        repo: Name of the repository: org/name.
        public: Make the repository public, or write to a public one.

    Returns:
        The address of the repository.

    Raises:
        SettingsError: there is no such export, or the name or the token is none.
        PushError: the Hub does not answer within seconds, or refuses.

    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if not is_hub_form(repo) or repo.count("/") != 1:
        raise SettingsError(f"repo={repo!r} is no name on the Hub: give org/name.")
    with forge_dist.temporary_folder() as scratch:
        request = ExportRequest.of(run, scratch / "export", merge=False, dtype=None, format="hf").read()
    card = _card(request)
    files = [file for file in sorted(request.folder.rglob("*")) if file.is_file() and file.name != "README.md"]
    token = get_token()
    if token is None:
        raise SettingsError("there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN.")
    if constants.HF_HUB_OFFLINE:
        raise SettingsError("HF_HUB_OFFLINE is set, and a push needs the Hub: unset it.")
    _check_answers(constants.ENDPOINT)
    api = HfApi(endpoint=constants.ENDPOINT, token=token)
    try:
        try:
            private = api.repo_info(repo).private
        except RepositoryNotFoundError:
            private = not public
            api.create_repo(repo, private=private)
        if not private and not public:
            raise SettingsError(f"repo={repo} is public: set public=True to write to it, or give another name.")
        operations: list[Any] = [CommitOperationAdd("README.md", card.encode())]
        operations += [CommitOperationAdd(file.relative_to(request.folder).as_posix(), file) for file in files]
        api.create_commit(repo, operations, commit_message=f"{request.folder.name}, trained by forge")
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "")
        why = "the token may not write there" if status in (401, 403) else str(error).strip().splitlines()[0]
        raise PushError(f"repo={repo}: the Hub refuses ({status}): {why}.") from error
    except ForgeError:
        raise
    except Exception as error:  # whatever the connection ends with
        raise PushError(
            f"repo={repo}: the upload broke off: {error}. Nothing of it is there; the same command repeats it."
        ) from error
    return f"{constants.ENDPOINT}/{repo}"


def _card(request: ExportRequest) -> str:
    """Return the model card of an export: its own, or a new one of the run."""
    own = request.folder / "README.md"
    if own.is_file() and request.run is None:
        return own.read_text(encoding="utf-8")
    try:
        template = bool(forge_data.load_tokenizer(str(request.folder)).chat_template)
    except forge_data.TokenizerError:
        template = False
    config = read_json(request.folder / "config.json") or read_json(Path(request.base) / "config.json")
    architecture = next(iter(config.get("architectures") or []), "")
    return model_card(request, file=None, proofs=_proofs(request), architecture=architecture, chat_template=template)


def _proofs(request: ExportRequest) -> list[str]:
    """Return how the run compared this export with the model in memory, from its events."""
    if request.run is None:
        return []
    try:
        last = [event for event in events(request.run, "exported") if event.get("export") == request.folder.name][-1]
        figures = f"{last['reloaded']:.4f}, {last['in_memory']:.4f} in memory"
        return [f"Loaded back after training: on {counted(last['on'], 'samples')} its {last['measure']} is {figures}."]
    except (IndexError, KeyError, ValueError, TypeError):
        return []


def _check_answers(endpoint: str) -> None:
    """Raise PushError where the Hub does not answer within seconds, whatever delays it."""
    answered: list[BaseException | None] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{endpoint}/api/models?limit=1", timeout=SECONDS).close()  # noqa: S310 - as HF_ENDPOINT has it
            answered.append(None)
        except urllib.error.HTTPError:
            answered.append(None)  # it answers, if only to refuse
        except OSError as error:
            answered.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if answered != [None]:
        why = f": {getattr(answered[0], 'reason', answered[0])}" if answered else f" within {SECONDS:g} s"
        raise PushError(
            f"{endpoint} does not answer{why}. Is there a network? The export stays in its directory, and can be pushed later."
        )
