"""Sequence classification model with one label, as a reward function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import RewardError
from forge_algos._modules import mode
from forge_algos.batches._media import media_row_inputs
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._packable import require_packable
from forge_algos.heads._scalar_head import choose_scalar_head


class RewardModel:
    """Reward function that scores completions at the last token, in packed rows.

    Prompt and completion are tokenised as the model's own tokens. Text is tokenised as one, and ends in the tokenizer's EOS, as
    `forge_data` ends the texts that a reward model learns from; messages go through its chat template. Each rank calls it by
    itself: the model is whole on each. A conversation with images is computed in a forward of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any,
        max_tokens: int,
        max_positions: int | None = None,
        device: torch.device | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        pictured: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, NDArray[Any]] | None] | None = None,
    ) -> None:
        """Test the model once.

        Args:
            model: on `device`; it is never trained.
            tokenizer: the reward model's own, of transformers.
            max_tokens: tokens of a row; a longer text has a row to itself.
            max_positions: tokens of the longest text that it can read, for a model with a table of positions.
            device: where it computes; the model's by default.
            autocast: as for `train`.
            pictured: makes the arguments of a forward of a conversation with images, `input_ids` int64[1, S] and what the
                model's processor makes beside; None of one without.

        Raises:
            LossError: the model does not give a sequence one number.
            PackedBatchError: it does not keep a row's documents apart.
        """
        self._device = next(model.parameters()).device if device is None else device
        self._head = choose_scalar_head(model, device=self._device)
        require_packable(model, device=self._device)
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._max_positions = max_positions
        self._autocast = autocast
        self._pictured = pictured

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_columns: Any) -> list[float]:
        """Score each completion."""
        found: list[float | None] = []
        texts: list[NDArray[np.int64]] = []
        with mode(self._head.model, training=False), torch.no_grad():
            for prompt, completion in zip(prompts, completions, strict=True):
                made = None
                if self._pictured is not None and not isinstance(prompt, str):
                    made = self._pictured([*prompt, *completion])
                if made is None:
                    texts.append(self._ids(prompt, completion))
                found.append(None if made is None else self._score_media(made))
            scores = iter([score for row in self._rows(texts) for score in self._scores(row)])
        return [next(scores) if score is None else score for score in found]

    def _scores(self, row: Sequence[NDArray[np.int64]]) -> list[float]:
        """Score the texts of a packed row."""
        return self._read(self._inputs(row), np.cumsum([len(ids) for ids in row]) - 1)

    def _score_media(self, made: Mapping[str, NDArray[Any]]) -> float:
        """Score a conversation with images, in a forward of its own."""
        ids = self._checked(made["input_ids"][0])
        media = {name: array for name, array in made.items() if name != "input_ids"}
        packed = self._inputs([ids])
        inputs = media_row_inputs(self._head.model, packed["input_ids"][0], (0, len(ids)), [media], packed=packed, on_host=ids)
        return self._read(inputs, np.array([len(ids) - 1]))[0]

    def _inputs(self, row: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
        lengths = np.array([len(ids) for ids in row])
        return packed_inputs(
            torch.from_numpy(np.concatenate(row)).to(self._device),
            torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(self._device),
            torch.from_numpy(np.append(0, lengths.cumsum())),
            int(lengths.max()),
        )

    def _read(self, inputs: dict[str, Any], ends: NDArray[np.int64]) -> list[float]:
        with self._autocast():
            scores: list[float] = self._head.scores(inputs, torch.from_numpy(ends).to(self._device)).tolist()
        return scores

    def _ids(self, prompt: Any, completion: Any) -> NDArray[np.int64]:
        if isinstance(prompt, str):
            ids = list(self._tokenizer(prompt + completion)["input_ids"])
            if (end := self._tokenizer.eos_token_id) is not None and ids[-1:] != [end]:
                ids.append(end)
        else:
            ids = list(self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=True, return_dict=False))
        if not ids:
            raise RewardError("the reward model's tokenizer makes no token of a prompt and its completion")
        return self._checked(np.array(ids, np.int64))

    def _checked(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Refuse more tokens than the model's table has positions."""
        if self._max_positions is not None and len(ids) > self._max_positions:
            raise RewardError(
                f"a prompt with its completion has {len(ids):,} of the reward model's tokens, and its table has "
                f"{self._max_positions:,} positions, beyond which it reads nothing; lower max_new_tokens or max_prompt_len, or "
                "take a reward model with more positions"
            )
        return ids

    def _rows(self, documents: Sequence[NDArray[np.int64]]) -> Iterator[list[NDArray[np.int64]]]:
        row: list[NDArray[np.int64]] = []
        for ids in documents:
            if row and sum(map(len, row)) + len(ids) > self._max_tokens:
                yield row
                row = []
            row.append(ids)
        if row:
            yield row
