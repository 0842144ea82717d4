"""Tests whether a model may be trained on packed rows, in the way in which it is fed them.

A model with virtual tokens before each document gets documents in padded lines under a mask; that they come out as alone is
tried and not inferred from names, as in `isolation`. Alone is plain PEFT with one document and no mask.
"""

from collections.abc import Sequence
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import nn

from forge_algos._errors import AdapterError, PackedBatchError
from forge_algos._modules import unwrap, virtual_tokens
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._layout import Layout, lay_out
from forge_algos.isolation._by_layers import Run
from forge_algos.isolation._compare import Compare, decides
from forge_algos.isolation._isolation import (
    Passed,
    batch_hidden_states,
    made_up_ids,
    require_isolation,
    require_passed,
)

_LENGTHS = (4, 7)
_passed: Passed = WeakKeyDictionary()


def require_packable(model: nn.Module, *, device: torch.device) -> None:
    """Raise unless documents of one row come out as alone, fed as `lay_out` does.

    Raises:
        PackedBatchError: they do not; two made-up ones are tried. Or `torch.compile` has the model as a whole.
        AdapterError: virtual tokens cannot stand before each document.
    """
    if type(unwrap(model)).__name__ == "OptimizedModule":  # torch's; naming the class would import the compiler
        raise PackedBatchError(
            "the model is compiled as a whole, and its head is computed otherwise while it learns: leave torch.compile(model) "
            "out, and compile its layers, `for block in forge_algos.repeated_blocks(model): block.compile()`"
        )
    if virtual_tokens(model):
        _require_lines(model, device=device)
    else:
        try:
            require_isolation(model, device=device, decide=decides(model))
        except PackedBatchError as error:
            raise PackedBatchError(
                f"{error}. Or call forge_algos.keep_documents_apart(model, device=...) first, which runs each document alone"
            ) from error


def _require_lines(model: nn.Module, *, device: torch.device) -> None:
    """Raise unless documents in lines come out as alone, with all that stands before each token.

    Virtual tokens are among it.

    Raises:
        AdapterError: they do not, or the model cannot run such a batch at all.
    """
    kind = str(unwrap(model).active_peft_config.peft_type.value)  # pyrefly: ignore[missing-attribute]  a PeftModel's
    if kind == "PREFIX_TUNING" and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise AdapterError(
            "adapter=prefix with activation_checkpointing: transformers drops the keys and values of the prefix while it "
            "trains so; leave activation_checkpointing out, or take adapter=prompt"
        )
    before = f"documents in lines before which virtual tokens stand ({kind})"
    require_passed(
        model,
        device,
        _problem,
        _passed,
        lambda what, refusal: AdapterError(f"{what} cannot run {before}: {refusal}. {_REMEDY}"),
        lambda what, problem: AdapterError(f"{what} does not do what virtual tokens need ({kind}): {problem}. {_REMEDY}"),
    )


_REMEDY = "Load it with attention=sdpa or eager, or take adapter=lora"


def _problem(model: nn.Module, device: torch.device) -> str | None:
    ids, vocab = made_up_ids(model, sum(_LENGTHS), device)
    lines, documents = cache(partial(_in_lines, model, ids)), ids.split(list(_LENGTHS))

    def alone(which: int) -> torch.Tensor:
        return batch_hidden_states(model, {"input_ids": documents[which][None], "use_cache": False})

    with Compare(model, decides(model)) as compare:

        def apart(which: int) -> bool:
            length, width = _LENGTHS[which], max(_LENGTHS)
            other = torch.cat([part if number == which else (part + 1) % vocab for number, part in enumerate(documents)])

            # Virtual tokens have places, the first ones, only as embeddings; they are looked at too.
            def in_lines(count: int, places: int) -> Sequence[int] | None:
                begin = which * places
                return range(begin, begin + places - width + length) if count == len(documents) and places >= width else None

            def in_one(count: int, places: int) -> Sequence[int] | None:
                return range(places) if count == 1 and places >= length else None

            return compare.by_layers(
                lambda: lines()[which],
                Run(lambda: _run_lines(model, ids)[1], in_lines),
                Run(lambda: alone(which), in_one),
                Run(lambda: _run_lines(model, other)[1], in_lines),
                own=length,
            )

        for which, name in enumerate(("first", "second")):
            equal = compare.equal(lambda which=which: lines()[which], lambda which=which: alone(which)[0, -_LENGTHS[which] :])
            if not equal and not apart(which):
                return f"the {name} of two documents comes out otherwise than alone"
        changed = ids.clone()
        changed[-2] = (changed[-2] + 1) % vocab
        others = cache(partial(_in_lines, model, changed))
        first = compare.equal(lambda: others()[0], lambda: lines()[0])
        if not first or not compare.equal(lambda: others()[1][:-2], lambda: lines()[1][:-2]):
            return "tokens before a changed one change with it"
        # An attention that counts its queries from the first key on would see the virtual tokens in the places of the
        # document's own.
        if not compare.holds(lambda: not torch.equal(others()[1][-1], lines()[1][-1])):
            return "a token does not see the one before it"
    return None


def _in_lines(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run the documents in lines; returns hidden states (or logits) float[S, D] of each."""
    layout, hidden = _run_lines(model, ids)
    return layout.packed(hidden)[0].split(list(_LENGTHS))


def _run_lines(model: nn.Module, ids: torch.Tensor) -> tuple[Layout, torch.Tensor]:
    """Run the documents in lines; returns hidden states (or logits) float[B, S, D]."""
    positions = torch.cat([torch.arange(length) for length in _LENGTHS]).to(ids.device)
    row = packed_inputs(ids, positions, torch.tensor([0, *_LENGTHS]).cumsum(0), max(_LENGTHS))
    layout = lay_out(model, row)
    return layout, batch_hidden_states(model, layout.inputs)
