"""Sampling with transformers' `generate`: left-padded batches under a mask, with a KV cache.

Not with `generate_batch` (continuous batching): transformers 5.23 refuses any attention but its own there, so not forge's
`documents`; it draws in an order that depends on what else is scheduled, so the same seed gave a prompt another completion
beside other prompts; and on a CPU two requests of five tokens took 17 seconds. What it would save is small where completions
have similar lengths. On a GPU it was not tried.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._cache_argument import cache_argument
from forge_algos._errors import RolloutError
from forge_algos._modules import causal_model, mode, unwrap, virtual_tokens
from forge_algos._parallel import ALONE, Parallel
from forge_algos.batches._images import ImageInputs, image_row_inputs
from forge_algos.isolation._alone import runs_alone
from forge_algos.isolation._compare import REFUSALS, Compare
from forge_algos.isolation._isolation import made_up_ids, made_up_lengths
from forge_algos.isolation._layers import divided_layers
from forge_algos.isolation._rotary import growing_positions, reset_frequencies
from forge_algos.online.sampling._draw import DrawToken, RepetitionPenalty, Warp, uniforms
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
        self._shares = self._may_share()
        self._tried = False
        self._pads: bool | None = None
        self._mates: bool | None = None

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
    ) -> list[Completion]:
        """Sample as `Sampler.sample`; with `synced` every rank calls it, one without prompts too."""
        known = range(len(prompts)) if numbers is None else numbers
        wanted = [(prompt, which) for prompt in range(len(prompts)) for which in range(num_generations)]
        found: dict[tuple[int, int], Completion] = {}
        # Prompts of similar length side by side: less padding.
        wanted.sort(key=lambda pair: len(prompts[pair[0]]), reverse=True)
        warps = _warps(temperature, top_p, top_k, min_p)
        with torch.no_grad(), mode(self._model, training=False), _default_generation_config(causal_model(self._model)):
            batches = list(self._batches(wanted, prompts, max_new_tokens))
            mixed = any(len({len(prompts[prompt]) for prompt, _ in batch}) > 1 for batch in batches)
            # Ranks that share the weights try it together, whatever each of them has.
            if self._pads is None and (mixed or self._synced):
                self._pads = self._pads_exactly()
            if self._mates is None and (any(len(batch) > 1 for batch in batches) or self._synced):
                self._mates = self._is_apart()
            batches = list(self._batches(wanted, prompts, max_new_tokens))
            while self._parallel.sum([len(batches)])[0] if self._synced else batches:
                if not batches:
                    # Other ranks that share the weights have a batch left.
                    self._generate([np.zeros(1, np.int64)], [0], torch.zeros(1, 1), [], 1)
                    continue
                batch = batches.pop(0)
                drawn = uniforms(seed, [(known[prompt], which) for prompt, which in batch], max_new_tokens)
                numbers_B = [prompt for prompt, _ in batch]
                rows = self._generate(
                    [prompts[prompt] for prompt in numbers_B], numbers_B, drawn, warps, max_new_tokens, repetition_penalty
                )
                found.update(zip(batch, rows, strict=True))
        return [found[pair] for pair in sorted(found)]

    def likeliest(self, prompt: NDArray[Any], inputs: ImageInputs, *, max_new_tokens: int) -> Completion:
        """Take the likeliest token after each other behind one prompt with images.
        With `synced` every rank calls it, with the same prompt.

        Args:
            prompt: int[S].
            inputs: what a processor makes of it, as `image_inputs` of a row has it.
            max_new_tokens: tokens that the completion may have.
        """
        warps = _warps(1.0, 1.0, 1, 0.0)
        with torch.no_grad(), mode(self._model, training=False), _default_generation_config(causal_model(self._model)):
            ids, _ = self._padded([prompt])
            made = image_row_inputs(self._model, ids[0], (0, len(prompt)), [inputs], packed={})
            more = {name: made[name] for name in made if name not in ("input_ids", "use_cache")}
            (found,) = self._generate([prompt], [0], torch.zeros(1, max_new_tokens), warps, max_new_tokens, inputs=more)
        return found

    def _batches(
        self, wanted: list[tuple[int, int]], prompts: Sequence[NDArray[Any]], max_new_tokens: int
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
            yield wanted[start : start + rows]
            start += rows

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
    ) -> Iterator[Any]:
        """Sample the first and the last token of the largest batches, and yield their caches.

        For the memory plan: the model holds no data, so its tokens have no values and every completion is as long as it may be.
        The tokens between take less. Arguments as of `sample`.
        """
        wanted = [(number, which) for number in range(len(prompts)) for which in range(num_generations)]
        wanted.sort(key=lambda pair: len(prompts[pair[0]]), reverse=True)
        batches = list(self._batches(wanted, prompts, max_new_tokens))
        warps = _warps(temperature, top_p, top_k, min_p)
        # One with the longest rows, and one with the most, whose logits take most.
        with torch.no_grad(), mode(self._model, training=False), _default_generation_config(causal_model(self._model)):
            for batch in {id(each): each for each in (batches[0], max(batches, key=len))}.values():
                numbers = [prompt for prompt, _ in batch]
                rows = [prompts[prompt] for prompt in numbers]
                ids, mask = self._padded(rows)
                uniforms_BS = torch.zeros(len(batch), max_new_tokens).to(ids.device)
                draw = DrawToken(_with_penalty(warps, repetition_penalty, ids, mask), uniforms_BS, ids.shape[1], checks=False)
                begun = self._begun(rows, numbers, ids, mask, numbered=False)
                cache = _cache(self._output(ids, mask, draw, max_new_tokens, whole=True, **begun))
                yield cache
                before = max_new_tokens - 2
                if before < 0 or virtual_tokens(self._model) or not _grow(cache, before):
                    continue
                yield cache
                ids, mask = (torch.cat([one, one.new_ones(len(batch), before + 1)], 1) for one in (ids, mask))
                yield _cache(self._output(ids, mask, draw, 1, whole=True, **{cache_argument(): cache}))

    def _generate(
        self,
        prompts: Sequence[NDArray[Any]],
        numbers: Sequence[int],
        uniforms_BS: torch.Tensor,
        warps: Sequence[Warp],
        max_new_tokens: int,
        repetition_penalty: float = 1.0,
        *,
        inputs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Completion]:
        """Return the completion of each row; rows of one number have the same prompt.

        `inputs` are further arguments of a forward.
        """
        ids, mask = self._padded(prompts)
        width = ids.shape[1]
        draw = DrawToken(_with_penalty(warps, repetition_penalty, ids, mask), uniforms_BS.to(ids.device), width)
        output = self._output(ids, mask, draw, max_new_tokens, **self._begun(prompts, numbers, ids, mask), **inputs)
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
        prompts: Sequence[NDArray[Any]],
        numbers: Sequence[int],
        ids: torch.Tensor,
        mask: torch.Tensor,
        *,
        numbered: bool = True,
    ) -> dict[str, Any]:
        """Compute keys and values of all tokens but the last, once for rows of one number.

        They are returned for `generate`: nothing where no number repeats, or a prompt is one token. The last token is fed as
        every drawn one is.
        """
        if not self._shares or len(set(numbers)) == len(numbers) or min(map(len, prompts)) < 2:
            return {}
        # Positions that go by the longest row would be others for all tokens but the last than for all.
        if growing_positions(self._model, ids.shape[1]):
            return {}
        if not self._tried:
            self._tried, self._shares = True, self._is_exact(numbered=numbered)
        cache = self._repeated(numbers, ids, mask) if self._shares else None
        return {} if cache is None else {cache_argument(): cache}

    def _repeated(self, numbers: Sequence[int], ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return the cache of all tokens but the last, a row for each number.

        None where it is more than keys and values.
        """
        _, first, row = np.unique(numbers, return_index=True, return_inverse=True)
        cache = _cache(self._output(ids[first, :-1], mask[first, :-1], None, 1, whole=True))
        if not _of_keys_alone(cache):
            return None
        cache.batch_select_indices(torch.from_numpy(row).to(ids.device))
        return cache

    def _is_exact(self, *, numbered: bool) -> bool:
        """Return whether made-up prompts computed once are followed by what follows each row.

        Not so where a model counts positions otherwise before a cache (CPM-Ant), or remembers something of each row itself, as
        Qwen-VL does of its positions.

        Args:
            numbered: whether the model has numbers; without them only that it runs is tried.
        """
        prompts, numbers = self._made_up_prompts(), [0, 0, 1, 1]
        ids, mask = self._padded([prompts[number] for number in numbers])

        def following(cache: Any) -> torch.Tensor:
            begun = {} if cache is None else {cache_argument(): cache}
            return self._output(ids, mask, None, 1, whole=True, output_logits=True, **begun).logits[0]

        try:
            if (cache := self._repeated(numbers, ids, mask)) is None:
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
                return _equal_each(compare, self._following(short, long), self._following(short))
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
                return _equal_each(compare, ours, alone) or (not compare.fine(ours) and _equal_each(compare, ours, changed))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            return False

    def _following(self, *prompts: NDArray[Any]) -> torch.Tensor:
        """Return logits float[2, V] behind a batch's first prompt and a given token after it."""
        ids, mask = self._padded(prompts)
        made = self._output(ids, mask, None, 2, whole=True, output_logits=True)
        return torch.stack([logits[0] for logits in made.logits])

    def _made_up_prompts(self) -> list[NDArray[Any]]:
        """Return two prompts, the shorter first, longer than what layers see at once."""
        lengths = made_up_lengths(self._model)
        ids, _ = made_up_ids(self._model, sum(lengths), torch.device("cpu"))
        return [prompt.numpy() for prompt in ids.split(list(lengths))]

    def _padded(self, prompts: Sequence[NDArray[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask int64[B, width], padded on the left, on the model's device."""
        device = next(causal_model(self._model).parameters()).device
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
        with self._autocast(), warnings.catch_warnings(), _first_frequencies(self._model):
            # PEFT computes positions itself, as intended.
            warnings.filterwarnings("ignore", message="Position ids are not supported")
            return sampled.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([draw or _made_up_token]),
                # Whoever draws nothing makes as many forwards on every rank.
                synced_gpus=self._synced and draw is not None,
                **more,
            )


def _made_up_token(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Leave only the token before the row's last one possible, in the place of `DrawToken`."""
    # There may be fewer scores than embeddings.
    token = input_ids[:, -2:][:, :1] % scores.shape[1]
    return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _equal_each(compare: Compare, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare logits [N, V] within rounding, each step's by its own largest."""
    steps = zip(ours.split(1), theirs.split(1), strict=True)
    return all(compare.equal(lambda one=one: one, lambda other=other: other) for one, other in steps)


def _cache(output: Any) -> Any:
    """Return the keys and values that `generate` gives beside the ids."""
    return getattr(output, cache_argument())


def _of_keys_alone(cache: Any) -> bool:
    """Return whether each layer of a cache has keys and values that other rows can take over."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return isinstance(cache, DynamicCache) and all(type(x) in (DynamicLayer, DynamicSlidingWindowLayer) for x in cache.layers)


def _grow(cache: Any, tokens: int) -> bool:
    """Add keys and values of so many tokens to a cache; return whether it has any."""
    grown = False
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor):
            more = [each.new_empty(*each.shape[:2], tokens, each.shape[3]) for each in (keys, values)]
            cache.update(*more, number)
            grown = True
    return grown


def _warps(temperature: float, top_p: float, top_k: int, min_p: float) -> list[Warp]:
    """Return logits processors in the order of `generate`'s own."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warps: list[Any] = []
    if temperature != 1.0:
        warps.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warps.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warps.append(TopPLogitsWarper(float(top_p)))
    if min_p:
        warps.append(MinPLogitsWarper(float(min_p)))
    return warps


def _with_penalty(warps: Sequence[Warp], penalty: float, ids: torch.Tensor, mask: torch.Tensor) -> Sequence[Warp]:
    """Put the penalty of repeated tokens before the other processors, as `generate` does."""
    return warps if penalty == 1.0 else [RepetitionPenalty(penalty, ids, mask), *warps]


@contextmanager
def _first_frequencies(model: nn.Module) -> Iterator[None]:
    """Begin with rotary frequencies that no earlier forward let grow, and leave such behind."""
    reset_frequencies(model)
    try:
        yield
    finally:
        reset_frequencies(model)


@contextmanager
def _default_generation_config(causal: Any) -> Iterator[None]:
    """Replace the model's own generation settings, which `generate` falls back to, in the block."""
    from transformers import GenerationConfig

    own = causal.generation_config
    causal.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = own
