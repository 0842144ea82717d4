"""Trained weights → a sampling server, before each rollout."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import forge_algos
import forge_data
import forge_dist
from forge._errors import SettingsError
from forge.tasks._media import media_inputs, sampled_media
from forge.tasks._task import Run

_FOLDER = "sampler"
_TEXT = "The quick brown fox counts: 1, 2, 3, 12345!\n  Déjà vu."
"""Text on which the tokenizers of server and run are compared."""
_SERVED_ADAPTERS = ("none", "osft", "lora")


def check_server_settings(s: Any) -> None:
    """Refuse what a sampling server cannot be given, before any work is done.

    Raises:
        SettingsError: an adapter that servers do not load, or ranks that share their prompts.

    """
    own = s.objective
    if own.sampler != "transformers" and s.adapter.adapter not in _SERVED_ADAPTERS:
        raise SettingsError(
            f"adapter={s.adapter.adapter} is refused with sampler={own.sampler}: servers load whole models and LoRA. Take "
            "adapter=lora, or sampler=transformers."
        )
    shared = "tp_size" if s.strategy.tp_size > 1 else "cp_size" if s.strategy.cp_size > 1 else None
    for name, value in (("sampler", own.sampler), ("env", own.env)):
        if shared is not None and value not in (None, "transformers"):
            raise SettingsError(
                f"{name}={value} is refused with {shared}={getattr(s.strategy, shared)}: ranks that share their prompts would "
                "each get completions of their own. Divide the data alone."
            )


class SamplingServer:
    """A server that samples for a run, and the weights that it has.

    Every rank makes one and calls it alike; the first one speaks of weights, and each asks for completions of its own prompts.
    """

    def __init__(self, run: Run, end_ids: list[int]) -> None:
        own = run.settings.objective
        self._run = run
        self._folder = run.root / _FOLDER
        self._adapter = run.writes == "adapter"
        self._number = 0
        media = sampled_media(run)
        self.sampler = forge_algos.online.RemoteSampler(
            own.sampler,
            own.sampler_url,
            eos_ids=end_ids,
            timeout=own.sampler_timeout,
            never=() if media is None else _known_to(run.model, media.token_ids),
        )
        ids = run.tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        longest = max(int(items.longest.max()) for items in (run.train, run.held_out) if items is not None)
        run.report.note(str(self.sampler.check(_TEXT, ids, longest)))
        if media is not None:
            self._check_media()
        run.ranks.first(lambda: shutil.rmtree(self._folder, ignore_errors=True))

    def _check_media(self) -> None:
        """Have the server expand a prompt with images, before there is anything to lose."""
        parts = [items for items in (self._run.train, self._run.held_out) if items is not None and items.store.has_media]
        row = int(parts[0].store.media_counts[:, 0].nonzero()[0][0])
        self.sampler.sample(
            [parts[0].store[row].input_ids],
            num_generations=1,
            max_new_tokens=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            media=[lambda: self._unexpanded(parts[0])[row]],
        )

    def media_of(self, items: Any) -> dict[str, Any]:
        """Return what the server is given of images, as an argument of `make_rollout`; {} for none."""
        return {} if items.media is None else {"sampler_media": self._unexpanded(items)}

    def _unexpanded(self, items: Any) -> _UnexpandedPrompts:
        return _UnexpandedPrompts(items, media_inputs(self._run.settings, self._run.tokenizer))

    def load(self) -> None:
        """Give the server the weights as they are now; collective."""
        run = self._run
        self._number += 1
        version = f"{run.identity['run']}-{self._number}-{run.ranks.broadcast(_moment())}"
        directory = self._folder / version
        forge_dist.doing("giving the sampling server the trained weights")
        run.write_model(directory)
        run.ranks.first(lambda: self.sampler.load(str(directory), version, adapter=self._adapter))
        self.sampler.expect(version, adapter=self._adapter)
        if not self._adapter:
            # Servers read an adapter again when it is used after others; whole weights are read once.
            run.ranks.first(lambda: shutil.rmtree(directory, ignore_errors=True))
        else:
            run.ranks.first(lambda: _remove_others(self._folder, version))


def _known_to(model: Any, tokens: Collection[int]) -> list[int]:
    """Return the tokens that a model has a logit for; servers refuse others."""
    vocabulary = model.config.get_text_config().vocab_size
    return [token for token in tokens if token < vocabulary]


class _UnexpandedPrompts(Mapping[int, forge_data.Unexpanded]):
    """Rows of prompts with images → what a server is given of them."""

    def __init__(self, items: Any, inputs: forge_data.MediaInputs) -> None:
        self._items, self._inputs = items, inputs

    def __getitem__(self, row: int) -> forge_data.Unexpanded:
        return self._inputs.unexpanded(self._items.store[row], self._items.source(row))

    def __contains__(self, row: object) -> bool:
        return row in self._items.media

    def __iter__(self) -> Iterator[int]:
        return iter(self._items.media)

    def __len__(self) -> int:
        return len(self._items.media)


def _moment() -> str:
    """Return a word that no earlier start of the same run had."""
    import secrets

    return secrets.token_hex(4)


def _remove_others(folder: Path, version: str) -> None:
    for each in folder.iterdir():
        if each.name != version:
            shutil.rmtree(each, ignore_errors=True)
