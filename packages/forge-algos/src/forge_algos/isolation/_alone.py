"""Documents of a packed row run alone, for a model that would mix them.

A model with a state or a convolution (Mamba, Qwen3.5), or one that builds its mask without positions (gpt-oss, Falcon), carries
one document of a row into the next. Such a model is given documents as lines of ordinary batches instead, within the forward of
its decoder: what is outside of the decoder (the head and the losses, wrappers that divide a model over ranks) sees the row's
hidden states as if it had been run packed.

Three ways are tried on made-up documents, the fastest first: lines of unequal documents, padded on the right without a mask (a
causal model cannot see what comes later); lines of equally long documents; one document a forward.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from forge_algos._cache_argument import has_cache
from forge_algos._counted import counted
from forge_algos._errors import PackedBatchError
from forge_algos._modules import (
    WITHOUT_DECODER,
    attention_of,
    causal_model,
    decoder,
    mode,
    override_forward,
)
from forge_algos.isolation._by_layers import Places, Run, in_row
from forge_algos.isolation._compare import REFUSALS, Compare, Decide, decide_by, decides
from forge_algos.isolation._isolation import (
    REMEDY,
    made_up_ids,
    made_up_lengths,
    require_isolation,
    with_and_without_autocast,
)
from forge_algos.isolation._layers import divide_layers, divided_layers, lengths_in_layer, undivide_layers
from forge_algos.isolation._rotary import growing_positions, reset_frequencies
from forge_algos.isolation._rows import OF_ROWS, Lines, divide, in_a_row, run_in_lines
from forge_algos.settings._packing import Packing

Agree = Callable[[int], int]

HOW = {
    "padded": "several in a forward, padded on the right",
    "equal": "equally long ones in a forward",
    "single": "one a forward",
}
_NAME = "_documents_alone"
"""Attribute of a causal model whose documents are run alone: its `_Alone`."""


def keep_documents_apart(
    model: nn.Module,
    *,
    device: torch.device,
    packing: Packing = "auto",
    longest: int | None = None,
    agree: Agree = lambda number: number,
    decide: Decide = int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[bool, str]:
    """Have `model` keep the documents of a packed row apart: in the row if it can, else alone.

    Args:
        model: bare or wrapped; where it is divided over ranks, every rank calls this, and all decide alike.
        device: where test rows go.
        packing: "on" refuses where they are not kept apart; "off" runs documents alone without the test of a packed row.
        longest: tokens of the longest document that will come; None if it is not known.
        agree: as of `run_documents_alone`.
        decide: number of this rank → the largest of all ranks, where several have the model, whole or divided: what they find
            here, and in later tests that all of them make, is the same then, also near a bound.
        autocast: makes the context that forwards run in; a packed row is tried in it too.

    Returns:
        tuple: whether rows are packed, and the reason.

    Raises:
        PackedBatchError: neither is possible, or `packing="on"` is not.
    """
    why = ""
    decide_by(model, decide)
    if packing == "on" and runs_alone(model):
        raise PackedBatchError(f"the documents of this {type(causal_model(model)).__name__} are run alone already")
    if packing != "off" and not runs_alone(model):
        try:
            _require_fixed_positions(model, longest)
            _require_isolation_by_layers(model, device, agree, autocast)
        except PackedBatchError as error:
            if packing == "on":
                raise
            why = f"{str(error).removesuffix(f'. {REMEDY}')}; "
        else:
            layers = divided_layers(model)
            how = f"; {counted(layers, 'layers')} with a state or a convolution, run document by document" if layers else ""
            return True, f"{type(causal_model(model)).__name__} keeps the documents of a test row apart{how}"
    how = run_documents_alone(model, device=device, longest=longest, agree=agree, autocast=autocast)
    return False, f"{why}documents are run alone, {how}"


def _require_isolation_by_layers(
    model: nn.Module, device: torch.device, agree: Agree, autocast: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Raise unless packed documents stay apart, if need be by dividing layers with a state.

    Raises:
        PackedBatchError: they do not, with undivided layers; the model is as it was.
    """
    decide = decides(model)
    try:
        require_isolation(model, device=device, autocast=autocast, decide=decide)
    except PackedBatchError:
        if divided_layers(model) or not divide_layers(model, agree):
            raise
        try:
            require_isolation(model, device=device, autocast=autocast, decide=decide)
        except PackedBatchError:
            undivide_layers(model)
        else:
            return
        raise


def run_documents_alone(
    model: nn.Module,
    *,
    device: torch.device,
    longest: int | None = None,
    agree: Agree = lambda number: number,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Run the documents of every later packed row of `model` alone; return how, in a few words.

    The forward of the decoder is replaced, or that of the causal model where it names no decoder or needs more of it than
    hidden states (ProphetNet), so that it stays so under adapters and wrappers that are put around the model afterwards. A row
    of B documents becomes one to B forwards of the decoder. Calls without `cu_seq_lens_q` are passed on as they are.

    Args:
        model: bare or wrapped; where it is divided over ranks, every rank calls this.
        device: where test rows go.
        longest: tokens of the longest document that will come; None if it is not known.
        agree: number of forwards of this rank → the largest of all ranks. Where a forward is collective, as in a model whose
            weights are divided, every rank must make equally many; a rank with fewer repeats one at weight 0.
        autocast: makes the context that forwards run in; the test rows run in it too.

    Raises:
        PackedBatchError: the model cannot run even one document, or its layers refuse a forward without a mask.
    """
    causal = causal_model(model)
    if (known := _alone(model)) is not None:
        return HOW[known.lines]
    _require_any_length(causal, longest)
    alone = _Alone(causal, decoder(causal), agree)
    try:
        alone.lines = _fastest(alone, model, device, longest, autocast)
    except PackedBatchError:
        if alone.module is causal:
            raise
        alone = _Alone(causal, None, agree)
        alone.lines = _fastest(alone, model, device, longest, autocast)
    alone.install()
    setattr(causal, _NAME, alone)
    return HOW[alone.lines]


def run_alone_as(model: nn.Module, draft: nn.Module | None) -> None:
    """Run documents of `model` alone, untried, as those of `draft`; None: each by itself."""
    found, causal = None if draft is None else _alone(draft), causal_model(model)
    whole = found is not None and found.output == "logits"
    alone = _Alone(causal, None if whole else decoder(causal), lambda number: number)
    alone.lines = "single" if found is None else found.lines
    alone.install()
    setattr(causal, _NAME, alone)


def runs_alone(model: nn.Module) -> bool:
    """Return whether `run_documents_alone` was called on the model."""
    return _alone(model) is not None


def _alone(model: nn.Module) -> "_Alone | None":
    return getattr(causal_model(model), _NAME, None)


def places_alone(model: nn.Module, lengths: Sequence[int]) -> tuple[int, int]:
    """Count the decoder's forwards, and their places with padding, for a row of documents."""
    alone = _alone(model)
    assert alone is not None
    groups = divide(lengths, alone.lines)
    return len(groups), sum(len(group) * max(lengths[document] for document in group) for group in groups)


def lengths_of_lines(model: nn.Module) -> torch.Tensor | None:
    """Return the lengths int64[B] of the running forward's or layer's documents, or None.

    They are 0 in a forward that is made for other ranks alone.
    """
    alone = _alone(model)
    return lengths_in_layer(model) if alone is None else alone.lengths


def tokens_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the tokens [T, M] of a layer's input [..., M], without what fills up lines."""
    if (lengths := lengths_of_lines(model)) is not None and x.dim() == 3:
        x = x[torch.arange(x.shape[1], device=x.device) < lengths[:, None]]
    return x.reshape(-1, x.shape[-1])


class _Alone:
    """Replaced forward of a decoder, and a hook on its model that reads where documents begin.

    The hook also removes the arguments that only a packed row has: not every model takes them.
    """

    def __init__(self, causal: nn.Module, body: nn.Module | None, agree: Agree) -> None:
        self.causal = causal
        self.module = causal if body is None else body
        self.plain: Callable[..., Any] = self.module.forward
        self.output = "logits" if body is None else "last_hidden_state"
        self.agree = agree
        self.lines: Lines = "single"
        self.lengths: torch.Tensor | None = None
        self.names = list(inspect.signature(self.plain).parameters)
        self._starts: list[int] | None = None

    def install(self) -> None:
        """Put `forward` in the place of the module's own."""
        self.causal.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.causal.register_forward_hook(self._end, always_call=True)
        self.module.forward = self.forward
        if self.output == "logits":
            setattr(self.causal, WITHOUT_DECODER, True)

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        if kwargs.get("kv_rows") is not None:
            raise PackedBatchError(
                "documents are run alone, so completions cannot share a prompt: collate with share_prompt=False"
            )
        if (boundaries := kwargs.get("cu_seq_lens_q")) is None:
            return None
        if kwargs.get("use_cache") or has_cache(kwargs) or kwargs.get("attention_mask") is not None:
            raise PackedBatchError("a row of documents that are run alone came with a KV cache or a mask: pass use_cache=False")
        self._starts = boundaries.tolist()
        return args, {name: value for name, value in kwargs.items() if name not in OF_ROWS}

    def _end(self, *_: Any) -> None:
        self._starts = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder: a packed row by its documents, any other call as it is."""
        if self._starts is None:
            return self.plain(*args, **kwargs)
        return self.run(self._starts, {**dict(zip(self.names, args, strict=False)), **kwargs})

    def run(self, starts: Sequence[int], given: dict[str, Any]) -> Any:
        """Run the documents of a row [1, T] in lines; return the row's output, float[1, T, ...]."""
        name = "inputs_embeds" if given.get("inputs_embeds") is not None else "input_ids"
        (row,) = given[name]
        rest = {key: value for key, value in given.items() if key not in (name, "logits_to_keep") and value is not None}
        lengths = [stop - start for start, stop in pairwise(starts)]
        groups = divide(lengths, self.lines)
        # Before the first forward: in it a rank may already wait for the others.
        missing = self.agree(len(groups)) - len(groups)
        forward = partial(self._forward, name, row, starts, lengths, rest)
        outs, whole = run_in_lines(forward, attrgetter(self.output), groups, lengths, missing)
        keep = given.get("logits_to_keep", 0)
        if self.output == "logits":
            whole = whole[:, keep] if isinstance(keep, torch.Tensor) else whole[:, -keep:]
        routed = zip(*(getattr(out, "router_logits", None) or () for out in outs), strict=True)
        routers = tuple(in_a_row(_lines(layer, groups), groups, lengths) for layer in routed)
        return type(outs[0])(**{self.output: whole}, **({"router_logits": routers} if routers else {}))

    def _forward(
        self,
        name: str,
        row: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        rest: dict[str, Any],
        documents: Sequence[int],
        *,
        counts: bool = True,
    ) -> Any:
        """Run some documents as lines [B, S], padded on the right without a mask."""
        parts = [row[starts[document] : starts[document + 1]] for document in documents]
        lines = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        self.lengths = torch.tensor([lengths[document] if counts else 0 for document in documents], device=row.device)
        # By a longer document before, a shorter one's positions would be others.
        reset_frequencies(self.causal)
        try:
            return self.plain(**{name: lines}, **rest)
        finally:
            self.lengths = None


def _lines(places: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Reshape each group's places [B * S, D] into lines [B, S, D]."""
    return [each.reshape(len(group), -1, each.shape[-1]) for each, group in zip(places, groups, strict=True)]


def _require_fixed_positions(model: nn.Module, longest: int | None) -> None:
    if growing_positions(model, longest):
        raise PackedBatchError(
            f"{type(causal_model(model)).__name__} does not keep packed documents apart: its rotary positions go by the "
            f"longest document of a forward. {REMEDY}"
        )


def _require_any_length(causal: nn.Module, longest: int | None) -> None:
    """Raise PackedBatchError for a model that trains on some lengths only.
    Reformer's hashing does, on whole chunks.
    """
    config = getattr(causal, "config", None)
    chunks = [length for kind in ("lsh", "local") if (length := getattr(config, f"{kind}_attn_chunk_length", None))]
    if chunks and (longest is None or longest > min(chunks)):
        raise PackedBatchError(
            f"{type(causal).__name__} trains on documents of at most {min(chunks)} tokens, or of whole chunks of "
            f"{max(chunks)}: transformers refuses any other length. Set max_seq_len={min(chunks)}, or take another model"
        )


def _fastest(
    alone: _Alone,
    model: nn.Module,
    device: torch.device,
    longest: int | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Lines:
    """Return the first way in which made-up documents come out as each does by itself."""
    refusals = []
    ways: list[Lines] = ["padded", "equal", "single"]
    problem = with_and_without_autocast(lambda model, device: None if _is_exact(alone, model, device) else "inexact", autocast)
    with mode(model, training=False), torch.no_grad():
        for lines in ways[growing_positions(model, longest) :]:
            alone.lines = lines
            try:
                if not problem(model, device):
                    return lines
            except torch.OutOfMemoryError:
                raise
            except REFUSALS as error:
                refusals.append(error)
    what = f"{type(causal_model(model)).__name__} with attention {attention_of(causal_model(model))!r}"
    why = f": {refusals[-1]}" if refusals else ""
    raise PackedBatchError(f"{what} does not compute a document alone as it does in a plain forward{why}")


def _is_exact(alone: _Alone, model: nn.Module, device: torch.device) -> bool:
    """Compare documents of a row, run in lines, with each in a plain forward of its own."""
    # As much padding as lines may have that are as long as these: what sees it differs by more than layers are allowed to.
    short, _ = made_up_lengths(model)
    lengths = [short, short * 7 // 5, short]
    ids, vocab = made_up_ids(model, sum(lengths), device)
    starts, documents = [0, *accumulate(lengths)], ids.split(lengths)

    def run(forward: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            out = forward({**dict(zip(alone.names, args, strict=False)), **kwargs})
            found.append(getattr(out, alone.output))
            return out

        with override_forward(alone.module, record):
            model(input_ids=tokens[None], use_cache=False)
        return found[0]

    def together(tokens: torch.Tensor) -> torch.Tensor:
        return run(lambda given: alone.run(starts, given), tokens)

    def by_itself(document: int) -> torch.Tensor:
        return run(lambda given: alone.plain(**given), documents[document])

    row = cache(partial(together, ids))
    with Compare(model, decides(model)) as compare:
        for document, length in enumerate(lengths):
            before = starts[document]
            parts = [part if number == document else (part + 1) % vocab for number, part in enumerate(documents)]
            places = _places_in_lines(lengths, alone.lines, document)
            equal = compare.equal(
                lambda before=before, length=length: row()[0, before : before + length],
                lambda document=document: by_itself(document)[0],
            )
            if not equal and not compare.by_layers(
                row,
                Run(partial(together, ids), places),
                Run(partial(by_itself, document), in_row(length, range(length))),
                Run(partial(together, torch.cat(parts)), places),
            ):
                return False
    return True


def _places_in_lines(lengths: Sequence[int], lines: Lines, document: int) -> Places:
    """Return the places of a document in the lines of its forward, and in the row.
    Forwards whose lines differ in number or width are told from each other.
    """
    group = next(group for group in divide(lengths, lines) if document in group)
    width, begin = max(lengths[each] for each in group), sum(lengths[:document])
    known = {
        (len(group), width): range(group.index(document) * width, group.index(document) * width + lengths[document]),
        (1, sum(lengths)): range(begin, begin + lengths[document]),
    }
    return lambda count, places: known.get((count, places))
