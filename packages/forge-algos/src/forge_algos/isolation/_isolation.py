"""Tests whether a model with its attention keeps the documents of a packed row apart.

Nothing about an architecture is assumed: two made-up documents are run packed and alone. A model with a state or a convolution
(Mamba, LFM2) carries one document into the next; one that counts positions by itself (OPT) gives the second document others;
one that builds its mask without positions (Falcon, Bloom) lets the second document see the first.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import attention_of, causal_model, decoder, mode, not_finite, text_config, vocabulary
from forge_algos.batches._packed import packed_inputs
from forge_algos.isolation._by_layers import Run, in_row
from forge_algos.isolation._compare import REFUSALS, Compare, Decide, is_autocast

_SHORT = (5, 7)
"""Tokens of the made-up documents, beyond what the model's layers reach."""
_REACH = re.compile("window|chunk|conv|kernel|compress|stride|block_size")
"""Names of a configuration's numbers that may bound what a layer sees of a document at once."""
_FARTHEST = 160
"""Largest such number that is crossed: what reaches farther costs a forward of thousands of tokens."""
Passed = WeakKeyDictionary[nn.Module, tuple[str | None, torch.device]]
_passed: Passed = WeakKeyDictionary()
"""Model → attention and device that it passed with,
so that an evaluation every few steps does not test it again. The result does not depend on the weights."""


def require_isolation(
    model: nn.Module,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    decide: Decide = int,
) -> None:
    """Raise unless two documents in one row come out as in plain forwards.

    The second must do so whatever the first is. They are longer than the windows, chunks and convolutions of the model's
    configuration, up to 160 tokens. Tried in the weights' dtype, and under `autocast` too, where another kernel may run.

    Compared are the decoder's hidden states (or logits), relative to their largest value: at all tokens to 1e-4 in float32, at
    half of them to 0.05 below it. What exceeds that in fewer digits than float32's is compared layer by layer, each layer being
    given the same numbers, so that rounding cannot grow with the layers (`apart_by_layers`). Digits are those of the products:
    Mamba keeps float32 states between layers that multiply in bfloat16.

    Args:
        model: bare or wrapped.
        device: where test rows go.
        autocast: makes the context that forwards run in.
        decide: number of this rank → the largest of all ranks, where all make this test and must find the same.

    Raises:
        PackedBatchError: they do not, or the model cannot run a packed row at all.
    """
    require_passed(
        model,
        device,
        with_and_without_autocast(partial(_problem, decide=decide), autocast),
        _passed,
        lambda what, refusal: PackedBatchError(f"{what} cannot run a packed row: {refusal}"),
        lambda what, problem: PackedBatchError(f"{what} does not keep packed documents apart: {problem}. {REMEDY}"),
    )


def with_and_without_autocast(
    problem_of: Callable[[nn.Module, torch.device], str | None], autocast: Callable[[], AbstractContextManager[Any]]
) -> Callable[[nn.Module, torch.device], str | None]:
    """Return a test that runs in the weights' dtype, and under `autocast` or the caller's too.

    A model that refuses to run without autocast is tried under it alone, where there is one.
    """

    def problem(model: nn.Module, device: torch.device) -> str | None:
        refusal, found = None, None
        kind = torch.device(device).type  # or its name, which torch takes too
        known = torch.amp.is_autocast_available(kind)
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            try:
                found = problem_of(model, device)
            except torch.OutOfMemoryError:
                raise
            except REFUSALS as error:
                refusal = error
        with autocast():
            if is_autocast(device):
                return found or problem_of(model, device)
        if refusal is not None:
            raise refusal
        return found

    return problem


def made_up_lengths(model: nn.Module) -> tuple[int, int]:
    """Return the lengths of two made-up documents, up to a bound.
    They are longer than what the model's layers see at once.
    """
    config = text_config(model)
    known = config.to_dict() if hasattr(config, "to_dict") else {}
    # A position is embedded for each token of the row in some models, whatever the document.
    positions = known.get("max_position_embeddings")
    most = min(_FARTHEST, (positions - sum(_SHORT)) // 2) if isinstance(positions, int) else _FARTHEST
    reach = max((number for number in _reaches(known) if number <= most), default=0)
    return reach + _SHORT[0], reach + _SHORT[1]


def _reaches(known: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of a configuration that may bound what a layer sees at once."""
    for name, value in known.items():
        if _REACH.search(name):
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            yield from (number for number in values if isinstance(number, int) and not isinstance(number, bool))


def require_passed(
    model: nn.Module,
    device: torch.device,
    problem_of: Callable[[nn.Module, torch.device], str | None],
    passed: Passed,
    cannot: Callable[[str, Exception], Exception],
    wrong: Callable[[str, str], Exception],
) -> None:
    """Run a test once for each model, attention and device.

    Raises:
        Exception: what `cannot` makes of the model and its refusal, or `wrong` of the model and the problem found.
    """
    causal = causal_model(model)
    key = attention_of(causal), device
    if passed.get(model) == key:
        return
    what = f"{type(causal).__name__} with attention {key[0]!r}"
    problem, refusal = run_test(problem_of, model, device)
    if refusal is not None:
        raise cannot(what, refusal) from refusal
    if problem:
        raise wrong(what, problem)
    passed[model] = key


REMEDY = "Load it with another attention implementation, or take a model whose attention goes by position_ids or cu_seq_lens"


def run_test(
    problem_of: Callable[[nn.Module, torch.device], str | None], model: nn.Module, device: torch.device
) -> tuple[str | None, Exception | None]:
    """Run a test in evaluation mode and without gradients.

    Returns:
        tuple: the problem that `problem_of` found, or None; the exception by which the model refused to run, or None.
    """
    try:
        with mode(model, training=False), torch.no_grad():
            return problem_of(model, device), None
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        return None, error


def made_up_ids(model: nn.Module, number: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Make ids int64[number] of a test row, and return them with the size of the vocabulary.
    The size is `number` where the model does not state one.
    """
    vocab = vocabulary(model) or number
    return (torch.arange(number, device=device) * 7 + vocab // 3) % vocab, vocab


def _problem(model: nn.Module, device: torch.device, decide: Decide = int) -> str | None:
    lengths = made_up_lengths(model)
    ids, vocab = made_up_ids(model, sum(lengths), device)
    first, second = documents = ids.split(list(lengths))
    changed = (first, (second + 1) % vocab), ((first + 1) % vocab, second)
    places = range(lengths[0]), range(lengths[0], len(ids))

    def run_alone(which: int) -> torch.Tensor:
        # A plain forward, which gives no positions: RoBERTa's own begin behind the padding token's, not at 0.
        return hidden_states(model, {"input_ids": documents[which][None], "use_cache": False})

    packed, alone = cache(partial(_run, model, *documents)), cache(run_alone)

    def in_packed(which: int) -> torch.Tensor:
        return packed()[list(places[which])]

    with Compare(model, decide) as compare:

        @cache
        def apart(which: int) -> bool:
            return compare.by_layers(
                packed,
                Run(lambda: _run(model, *documents)[None], in_row(len(ids), places[which])),
                Run(lambda: run_alone(which)[None], in_row(lengths[which], range(lengths[which]))),
                Run(lambda: _run(model, *changed[which])[None], in_row(len(ids), places[which])),
            )

        for which, name in enumerate(("first", "second")):
            ours, theirs = partial(in_packed, which), partial(alone, which)
            if not compare.holds(lambda theirs=theirs: bool(theirs().isfinite().all())):
                found = f" (its weight {name} is not)" if (name := not_finite(model)) else ""
                return f"its outputs on made-up ids are not finite{found}, so nothing can be compared"
            if not compare.equal(ours, theirs) and not apart(which):
                return f"the {name} of two comes out otherwise than alone"
        other = partial(_run, model, *changed[1])
        if not compare.equal(partial(in_packed, 1), lambda: other()[list(places[1])]) and not apart(1):
            return "the second of two changes with the first"
    return None


def _run(model: nn.Module, *documents: torch.Tensor) -> torch.Tensor:
    """Run documents in one row; returns hidden states (or logits) float[T, D]."""
    lengths = [len(document) for document in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.cat(documents)
    return hidden_states(model, packed_inputs(ids, positions.to(ids.device), boundaries, max(lengths)))


def hidden_states(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Run one row and return the decoder's output float[T, D], or logits without a decoder."""
    return batch_hidden_states(model, inputs)[0]


def batch_hidden_states(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Run a forward and return the decoder's output float[B, S, D], or logits without a decoder.
    S counts virtual tokens where the decoder is given them as tokens.
    """
    body = decoder(model)
    if body is None:
        output = model(**inputs)
        if not isinstance(getattr(output, "logits", None), torch.Tensor):
            raise TypeError(f"its forward returns {type(output).__name__}; an object with `logits`, float[B, S, V], is wanted")
        return output.logits
    # Read by a hook, not by a call: a decoder that is called without its wrappers would find weights that were not gathered.
    seen: list[torch.Tensor] = []
    handle = body.register_forward_hook(lambda _module, _args, output: seen.append(output.last_hidden_state))
    try:
        model(**inputs)
    finally:
        handle.remove()
    return seen[0]
