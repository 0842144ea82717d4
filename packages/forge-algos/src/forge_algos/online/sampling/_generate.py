"""Sampling with transformers' `generate`: left-padded batches under a mask, with a KV cache.

Not with `generate_batch` (continuous batching): transformers 5.23 refuses any attention but its own there, so not forge's
`documents`; it draws in an order that depends on what else is scheduled, so the same seed gave a prompt another completion
beside other prompts; and on a CPU two requests of five tokens took 17 seconds. What it would save is small where completions
have similar lengths. On a GPU it was not tried.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._cache_argument import cache_argument
from forge_algos._errors import RolloutError
from forge_algos._modules import causal_model, mode, unwrap, virtual_tokens
from forge_algos._parallel import ALONE, Parallel
from forge_algos.batches._media import is_seen, line_inputs
from forge_algos.isolation._alone import runs_alone
from forge_algos.isolation._compare import REFUSALS, Compare, decides
from forge_algos.isolation._isolation import made_up_ids, made_up_lengths
from forge_algos.isolation._layers import divided_layers
from forge_algos.isolation._rotary import growing_positions
from forge_algos.online.sampling._draw import DrawToken, Warp, uniforms
from forge_algos.online.sampling._generation import (
    cache_of,
    default_generation_config,
    first_frequencies,
    gathered_for_media,
    grow,
    made_up_token,
    of_keys_alone,
    warps_of,
    with_penalty,
)
from forge_algos.online.sampling._media_rows import (
    Beside,
    Line,
    MediaOf,
    SampledMedia,
    checked_media,
    equal_each,
    lines_of,
    may_stand_beside,
    tried_lines,
)
from forge_algos.online.sampling._sampler import Completion


class GenerateSampler:
    """Sampler that draws from the very model that is trained, in evaluation mode, as it is then.

    Where a model's cache is keys and values alone, a prompt's tokens but its last are computed once for all of its completions
    in a batch. That this gives the same is tried on made-up prompts first: a model may keep more of a prompt elsewhere.

    The model's own generation settings (a repetition penalty, a top_k) are not read: only the arguments count.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        batch_tokens: int,
        synced: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        parallel: Parallel = ALONE,
        media: SampledMedia | None = None,
    ) -> None:
        """Take the model and the tokens that end a completion; nothing is sampled yet.

        Args:
            model: a transformers causal language model, perhaps with an adapter or wrapped.
            eos_ids: the tokens that end a completion.
            pad_id: fills up prompts on the left; it is masked, so any id will do.
            batch_tokens: tokens, prompts and completions together, that a batch may have room for (the KV cache's size); a
                single row is always allowed.
            synced: the model is divided over the ranks of `parallel`, so that all of them make every forward together.
            autocast: as for `train`.
            parallel: the ranks; read with `synced` alone.
            media: of prompts of which some have images; `sample` takes theirs then.

        Raises:
            RolloutError: no token ends a completion, or there is no room for one; or virtual tokens on a divided model.
        """
        if synced and virtual_tokens(model):
            raise RolloutError(
                "a model with virtual tokens (adapter=prefix or prompt) cannot sample while it is divided over ranks: take "
                "strategy=ddp or single, or adapter=lora"
            )
        if not eos_ids:
            raise RolloutError(
                "eos_ids: without a token that ends a completion every one would be cut off; give the tokenizer's"
            )
        if batch_tokens < 1:
            raise RolloutError(f"batch_tokens: at least 1 is wanted, not {batch_tokens}")
        self._model = model
        self._eos_ids = [int(i) for i in eos_ids]
        self._pad_id = int(pad_id)
        self._batch_tokens = batch_tokens
        self._synced = synced
        self._autocast = autocast
        self._parallel = parallel
        self._media = media
        self._shares = self._may_share()
        self._tried = False
        self._beside: Beside | None = None
        self._shares_media: bool | None = None if self._shares else False
        self._pads: bool | None = None
        self._mates: bool | None = None
        self._greedy = False

    @property
    def synced(self) -> bool:
        """Whether all ranks make every call together, also one without prompts."""
        return self._synced

    def sample(
        self,
        prompts: Sequence[NDArray[Any]],
        *,
        num_generations: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        numbers: Sequence[int] | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        media: Sequence[MediaOf] | None = None,
    ) -> list[Completion]:
        """Sample as `Sampler.sample`; with `synced` every rank calls it, one without prompts too."""
        media = checked_media(media, len(prompts), self._media)
        known = range(len(prompts)) if numbers is None else numbers
        self._greedy = top_k == 1
        wanted = [(prompt, which) for prompt in range(len(prompts)) for which in range(num_generations)]
        found: dict[tuple[int, int], Completion] = {}
        # Prompts of similar length side by side: less padding.
        wanted.sort(key=lambda pair: len(prompts[pair[0]]), reverse=True)
        warps = self._warps(temperature, top_p, top_k, min_p)
        with torch.no_grad(), mode(self._model, training=False), default_generation_config(causal_model(self._model)):
            if self._media is not None and self._beside is None and (any(media) or self._synced):
                decide = decides(self._model) if self._synced else int
                self._beside = may_stand_beside(self._model, self._media, self._behind, decide)
            batches = list(self._batches(wanted, prompts, max_new_tokens, media))
            mixed = any(len({len(prompts[prompt]) for prompt, _ in batch}) > 1 for batch in batches)
            # Ranks that share the weights try it together, whatever each of them has.
            if self._pads is None and (mixed or self._synced):
                self._pads = self._pads_exactly()
            if self._mates is None and (any(len(batch) > 1 for batch in batches) or self._synced):
                self._mates = self._is_apart()
            batches = list(self._batches(wanted, prompts, max_new_tokens, media))
            while self._parallel.sum([len(batches)])[0] if self._synced else batches:
                if not batches:
                    # Other ranks that share the weights have a batch left.
                    self._generate([Line(np.zeros(1, np.int64))], [0], torch.zeros(1, 1), [], 1)
                    continue
                batch = batches.pop(0)
                drawn = uniforms(seed, [(known[prompt], which) for prompt, which in batch], max_new_tokens)
                numbers_B = [prompt for prompt, _ in batch]
                lines = lines_of(numbers_B, prompts, media)
                rows = self._generate(lines, numbers_B, drawn, warps, max_new_tokens, repetition_penalty)
                found.update(zip(batch, rows, strict=True))
        return [found[pair] for pair in sorted(found)]

    def _batches(
        self,
        wanted: list[tuple[int, int]],
        prompts: Sequence[NDArray[Any]],
        max_new_tokens: int,
        media: Sequence[MediaOf],
    ) -> Iterator[list[tuple[int, int]]]:
        start = 0
        while start < len(wanted):
            # The batch is sorted: its first prompt is the longest.
            longest, virtual = len(prompts[wanted[start][0]]), virtual_tokens(self._model)
            rows = max(1, self._batch_tokens // (virtual + longest + max_new_tokens))
            moves = growing_positions(self._model, virtual + longest + max_new_tokens)
            if self._pads is False or moves or virtual or runs_alone(self._model) or divided_layers(self._model):
                # No padding: PEFT puts virtual tokens before it, and so farther from a shorter prompt than in training; not
                # every model with a state leaves padding out of it, and not every one counts positions after it (BART);
                # rotary positions may go by the longest row.
                rows = min(rows, sum(len(prompts[prompt]) == longest for prompt, _ in wanted[start:]))
            if self._mates is False:
                rows = 1
            rows = self._beside_media([prompt for prompt, _ in wanted[start : start + rows]], media)
            yield wanted[start : start + rows]
            start += rows

    def _beside_media(self, numbers: Sequence[int], media: Sequence[MediaOf]) -> int:
        """Return how many of these rows may be a batch, by the images of their prompts."""
        if self._beside == "any":
            return len(numbers)
        if media[numbers[0]] is not None:
            return 1 if self._beside == "none" else sum(number == numbers[0] for number in numbers)
        return next((at for at, number in enumerate(numbers) if media[number] is not None), len(numbers))

    def first_and_last(
        self,
        prompts: Sequence[NDArray[Any]],
        *,
        num_generations: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        media: Sequence[MediaOf] | None = None,
    ) -> Iterator[Any]:
        """Sample the first and the last token of the largest batches, and yield their caches.

        For the memory plan: the model holds no data, so its tokens have no values and every completion is as long as it may be.
        The tokens between take less. Arguments as of `sample`.
        """
        media = checked_media(media, len(prompts), self._media)
        if self._media is not None:
            self._beside = "any" if self._media.joins else "same"  # as most models have it: what is made up tells nothing
        wanted = [(number, which) for number in range(len(prompts)) for which in range(num_generations)]
        wanted.sort(key=lambda pair: len(prompts[pair[0]]), reverse=True)
        batches = list(self._batches(wanted, prompts, max_new_tokens, media))
        warps = self._warps(temperature, top_p, top_k, min_p)
        done: list[list[tuple[int, int]]] = []
        with torch.no_grad(), mode(self._model, training=False), default_generation_config(causal_model(self._model)):
            # With the longest rows, with the most, whose logits take most, and with most tokens of prompts in one forward. The
            # last is chosen when the first has tried whether a prompt is computed once for its rows.
            sizes = (lambda of: len(prompts[of[0][0]]), len, lambda of: self._computed_at_once(of, prompts, media))
            for size in sizes:
                if (batch := max(batches, key=size)) in done:
                    continue
                done.append(batch)
                numbers = [prompt for prompt, _ in batch]
                rows = lines_of(numbers, prompts, media)
                ids, mask = self._padded(rows)
                uniforms_BS = torch.zeros(len(batch), max_new_tokens).to(ids.device)
                draw = DrawToken(with_penalty(warps, repetition_penalty, ids, mask), uniforms_BS, ids.shape[1], checks=False)
                begun = self._begun(rows, numbers, ids, mask, numbered=False)
                first = self._output(ids, mask, draw, max_new_tokens, whole=True, output_logits=True, **begun)
                # `generate` holds the scores of one token while it computes the next.
                cache, held = cache_of(first), first.logits
                del begun, first
                yield cache
                before = max_new_tokens - 2
                if before >= 0 and not virtual_tokens(self._model) and grow(cache, before):
                    yield cache
                    ids, mask = (torch.cat([one, one.new_ones(len(batch), before + 1)], 1) for one in (ids, mask))
                    yield cache_of(self._output(ids, mask, draw, 1, whole=True, **{cache_argument(): cache}))
                # The next batch begins without this one's.
                del cache, draw, held

    def _computed_at_once(self, batch: list[tuple[int, int]], prompts: Sequence[NDArray[Any]], media: Sequence[MediaOf]) -> int:
        """Return how many tokens of prompts a batch's first forward has, shared ones once."""
        numbers, width = {prompt for prompt, _ in batch}, len(prompts[batch[0][0]])
        shares = self._shares_media if any(media[number] is not None for number in numbers) else self._shares
        once = shares and not growing_positions(self._model, width)
        return (len(numbers) if once else len(batch)) * width

    def _generate(
        self,
        prompts: Sequence[Line],
        numbers: Sequence[int],
        uniforms_BS: torch.Tensor,
        warps: Sequence[Warp],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
    ) -> list[Completion]:
        """Return the completion of each row; rows of one number have the same prompt."""
        ids, mask = self._padded(prompts)
        width = ids.shape[1]
        draw = DrawToken(with_penalty(warps, repetition_penalty, ids, mask), uniforms_BS.to(ids.device), width)
        output = self._output(ids, mask, draw, max_new_tokens, **self._begun(prompts, numbers, ids, mask))
        draw.check_called(causal_model(self._model), greedy=self._greedy)
        made = output[:, width:].cpu().numpy().astype(np.int32)
        ends = np.isin(made, self._eos_ids)
        finished: list[bool] = [bool(row.any()) for row in ends]
        lengths = [int(row.argmax()) + 1 if row.any() else len(row) for row in ends]
        return [
            Completion(ids=ids[:length], finished=ended) for ids, length, ended in zip(made, lengths, finished, strict=True)
        ]

    def _may_share(self) -> bool:
        """Return whether rows may begin with keys and values computed for others of their prompt.

        Not what has a state, whose cache is more than keys and values; nor virtual tokens, which PEFT adds itself; nor where
        ranks count each other's forwards.
        """
        return not (self._synced or virtual_tokens(self._model) or runs_alone(self._model) or divided_layers(self._model))

    def _begun(
        self,
        prompts: Sequence[Line],
        numbers: Sequence[int],
        ids: torch.Tensor,
        mask: torch.Tensor,
        *,
        numbered: bool = True,
    ) -> dict[str, Any]:
        """Compute keys and values of all tokens but the last, once for rows of one number.

        They are returned for `generate`: where no number repeats, or a prompt is one token, the images alone. The last token is
        fed as every drawn one is.
        """
        repeats = len(set(numbers)) < len(numbers) and min(len(prompt.ids) for prompt in prompts) > 1
        # Positions that go by the longest row would be others for all tokens but the last than for all. That one is fed without
        # media, so that it must stand for none.
        text = self._media is None or self._media.token_ids.isdisjoint(int(prompt.ids[-1]) for prompt in prompts)
        repeats = repeats and text and not growing_positions(self._model, ids.shape[1])
        if repeats and self._may_repeat(any(prompt.media for prompt in prompts), numbered=numbered):
            cache = self._repeated(prompts, numbers, ids, mask)
            if cache is not None:
                return {cache_argument(): cache}
        return self._of_media(prompts)

    def _may_repeat(self, pictured: bool, *, numbered: bool) -> bool:
        """Return whether rows of one prompt may begin with what is computed for it once.

        It is tried once, and once for prompts with images (`pictured`).
        """
        if pictured:
            if self._shares_media is None:
                assert self._media is not None
                one, other = tried_lines(self._model, self._media)
                # Behind a cache `generate` would not be told which images a token sees.
                told = any(is_seen(array, len(one.ids)) for array in one.media.values())
                pair = [one, other if self._beside == "any" else one]
                self._shares_media = not told and self._is_exact(pair, numbered=numbered)
            return self._shares_media
        if self._shares and not self._tried:
            self._tried = True
            self._shares = self._is_exact([Line(ids) for ids in self._made_up_prompts()], numbered=numbered)
        return self._shares

    def _repeated(self, prompts: Sequence[Line], numbers: Sequence[int], ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return the cache of all tokens but the last, a row for each number.

        None where it is more than keys and values.
        """
        _, first, row = np.unique(numbers, return_index=True, return_inverse=True)
        media = self._of_media([prompts[at] for at in first], before_last=True)
        cache = cache_of(self._output(ids[first, :-1], mask[first, :-1], None, 1, whole=True, **media))
        if not of_keys_alone(cache):
            return None
        cache.batch_select_indices(torch.from_numpy(row).to(ids.device))
        return cache

    def _is_exact(self, pair: Sequence[Line], *, numbered: bool) -> bool:
        """Return whether two prompts computed once are followed by what follows each row.

        Not so where a model counts positions otherwise before a cache (CPM-Ant), or remembers something of each row itself, as
        Qwen-VL does of its positions.

        Args:
            pair: the prompts; one of them twice is one.
            numbered: whether the model has numbers; without them only that it runs is tried.
        """
        numbers = [0, 0, 1, 1] if pair[0] is not pair[1] else [0, 0]
        prompts = [pair[number] for number in numbers]
        ids, mask = self._padded(prompts)

        def following(cache: Any) -> torch.Tensor:
            begun = self._of_media(prompts) if cache is None else {cache_argument(): cache}
            return self._output(ids, mask, None, 1, whole=True, output_logits=True, **begun).logits[0]

        try:
            if (cache := self._repeated(prompts, numbers, ids, mask)) is None:
                return False
            # `generate` gives its logits in float32, whatever the products were.
            with Compare(self._model) as compare:
                shared, whole = following(cache), following(None)
                return not numbered or compare.equal(lambda: shared, lambda: whole)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            return False

    def _pads_exactly(self) -> bool:
        """Return whether a made-up prompt behind padding is followed by what follows it alone."""
        short, long = self._made_up_prompts()
        try:
            with Compare(self._model) as compare:
                return equal_each(compare, self._following(short, long), self._following(short))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            return False

    def _is_apart(self) -> bool:
        """Return whether a made-up prompt beside one as long is followed by what follows it alone.

        Not so in RWKV, which adds the last token of every row to each row's next one. In few digits two rows may round
        otherwise than one: there it is enough that another prompt beside it changes nothing, in as many rows.
        """
        prompt, long = self._made_up_prompts()
        beside, other = long[: len(prompt)], long[-len(prompt) :]
        try:
            with Compare(self._model) as compare:
                ours, changed, alone = (self._following(*rows) for rows in ((prompt, beside), (prompt, other), (prompt,)))
                return equal_each(compare, ours, alone) or (not compare.fine(ours) and equal_each(compare, ours, changed))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            return False

    def _following(self, *prompts: NDArray[Any]) -> torch.Tensor:
        """Return logits float[2, V] behind a batch's first prompt and a given token after it."""
        return self._behind([Line(prompt) for prompt in prompts])[:, 0]

    def _behind(self, prompts: Sequence[Line]) -> torch.Tensor:
        """Return logits float[2, B, V] behind a batch's prompts and a given token after each."""
        ids, mask = self._padded(prompts)
        made = self._output(ids, mask, None, 2, whole=True, output_logits=True, **self._of_media(prompts))
        return torch.stack(list(made.logits))

    def _of_media(self, prompts: Sequence[Line], *, before_last: bool = False) -> dict[str, Any]:
        """Return arguments for the images of prompts, or of prompts without their last tokens."""
        if not any(prompt.media for prompt in prompts):
            return {}
        media, lengths = [prompt.media for prompt in prompts], [len(prompt.ids) for prompt in prompts]
        media = media if self._media is None else self._media.join(media)
        of_tokens, of_media = line_inputs(self._model, media, lengths, self._device)
        return of_media | {name: array[:, :-1] if before_last else array for name, array in of_tokens.items()}

    def _made_up_prompts(self) -> list[NDArray[Any]]:
        """Return two prompts, the shorter first, longer than what layers see at once."""
        lengths = made_up_lengths(self._model)
        ids, _ = made_up_ids(self._model, sum(lengths), torch.device("cpu"))
        return [prompt.numpy() for prompt in ids.split(list(lengths))]

    @property
    def _device(self) -> torch.device:
        return next(causal_model(self._model).parameters()).device

    def _warps(self, temperature: float, top_p: float, top_k: int, min_p: float) -> list[Warp]:
        """Return logits processors; no token that stands for an image is possible."""
        never = () if self._media is None else sorted(self._media.token_ids)
        return warps_of(temperature, top_p, top_k, min_p, never=never, device=self._device)

    def _padded(self, lines: Sequence[Line]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask int64[B, width], padded on the left, on the model's device."""
        prompts, device = [line.ids for line in lines], self._device
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(np.asarray(prompt, np.int64))
            mask[row, width - len(prompt) :] = 1
        return ids.to(device), mask.to(device)

    def _output(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        draw: DrawToken | None,
        max_new_tokens: int,
        *,
        whole: bool = False,
        output_logits: bool = False,
        **more: Any,
    ) -> Any:
        """Return what `generate` gives for a batch: ids, or with `whole` the cache too.

        Without `draw` tokens are made up and none ends a row: rounding might choose another likeliest one.
        """
        from transformers import GenerationConfig, LogitsProcessorList

        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self._eos_ids if draw else None,
            pad_token_id=self._pad_id,
            use_cache=True,
            return_dict_in_generate=whole,
            output_logits=output_logits,
        )
        # PEFT adds virtual tokens in its own `generate`; any other adapter lies within the causal model.
        sampled: Any = unwrap(self._model) if virtual_tokens(self._model) else causal_model(self._model)
        # On all ranks alike, whichever have images now.
        gathered = gathered_for_media(self._model) if self._media is not None and self._synced else nullcontext()
        with self._autocast(), gathered, warnings.catch_warnings(), first_frequencies(self._model):
            # PEFT computes positions itself, as intended.
            warnings.filterwarnings("ignore", message="Position ids are not supported")
            return sampled.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([draw or made_up_token]),
                # Whoever draws nothing makes as many forwards on every rank.
                synced_gpus=self._synced and draw is not None,
                **more,
            )
