"""State-space and linear-attention layers that run the documents of a packed row apart.

A layer with a state or a convolution (Mamba 2, gated delta net, short convolutions) carries one document of a row into the
next, while attention beside it in the same model can keep documents apart. Such a layer is given the row's documents as lines
of a batch, padded on the right without a mask, which a causal layer cannot see; all other layers see the packed row.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._modules import causal_model
from forge_algos.isolation._rows import OF_ROWS, divide, run_in_lines

Agree = Callable[[int], int]

_STATE = frozenset({"A_log", "dt_bias", "slope_rate"})
"""Names of the parameters and buffers that a layer with a recurrent state has."""
_BOUNDS = OF_ROWS - {"position_ids"}
"""Arguments that say where the documents of a row begin."""
_NAME = "_documents_apart"
"""Attribute of a causal model whose layers run documents apart: their `_Layer`s."""


def divide_layers(model: nn.Module, agree: Agree = lambda number: number) -> list[str]:
    """Run the documents of later packed rows apart in layers with a state or a convolution.

    A layer learns where documents begin from the `cu_seq_lens_q` that it, or the layer that holds it, is called with;
    activation checkpointing finds them again. Calls without it are passed on as they are.

    Args:
        model: bare or wrapped; where it is divided over ranks, every rank calls this.
        agree: number of forwards of this rank → the largest of all ranks, as of `run_documents_alone`.

    Returns:
        list[str]: names of the layers, empty where the model has none.
    """
    causal = causal_model(model)
    found = dict(_layers_with_state(causal))
    if found:
        apart = _Apart(agree)
        for name, module in found.items():
            holder = causal.get_submodule(name.rpartition(".")[0])
            apart.add(module, apart.holders.setdefault(holder, _Holder(holder)))
        for each in (*apart.holders.values(), *apart.layers):
            each.install()
        setattr(causal, _NAME, apart)
    return list(found)


def undivide_layers(model: nn.Module) -> None:
    """Undo `divide_layers`."""
    if (apart := _apart(model)) is not None:
        for each in (*apart.holders.values(), *apart.layers):
            each.remove()
        delattr(causal_model(model), _NAME)


def divided_layers(model: nn.Module) -> int:
    """Count the layers that run the documents of a packed row apart."""
    apart = _apart(model)
    return 0 if apart is None else len(apart.layers)


def layers_apart(model: nn.Module) -> list[str]:
    """Name the layers that run the documents of a packed row apart, each with its class."""
    apart, names = _apart(model), {module: name for name, module in causal_model(model).named_modules()}
    return [] if apart is None else [f"{names[layer.module]} ({type(layer.module).__name__})" for layer in apart.layers]


def lengths_in_layer(model: nn.Module) -> torch.Tensor | None:
    """Return the lengths int64[B] of the running layer's documents; None outside of one.

    They are 0 in a forward that is made for other ranks alone.
    """
    apart = _apart(model)
    return None if apart is None else apart.lengths


def _apart(model: nn.Module) -> "_Apart | None":
    return getattr(causal_model(model), _NAME, None)


def _layers_with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with a convolution over time or a state's parameters."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        own = [*module._parameters, *module._buffers]
        if not _STATE.isdisjoint(own) or any(isinstance(child, nn.Conv1d) for child in module.children()):
            inside = f"{name}."
            yield name, module


@attrs.frozen
class _Lines:
    """Documents of a row as the lines of one batch or several."""

    lengths: list[int]
    groups: list[list[int]]
    missing: int
    """Forwards of other ranks beyond this one's."""


class _Apart:
    """What the divided layers of a model share."""

    def __init__(self, agree: Agree) -> None:
        self.agree = agree
        self.layers: list[_Layer] = []
        self.holders: dict[nn.Module, _Holder] = {}
        self.lengths: torch.Tensor | None = None

    def add(self, module: nn.Module, holder: "_Holder") -> None:
        """Take a layer among the divided ones."""
        self.layers.append(_Layer(module, holder, self))

    def lines(self, boundaries: torch.Tensor) -> _Lines:
        """Divide the documents of a row once; the tensor of their boundaries keeps the answer."""
        answers: dict[_Apart, _Lines] = boundaries.__dict__.setdefault(_NAME, {})
        if self not in answers:
            lengths = [stop - start for start, stop in pairwise(boundaries.tolist())]
            groups = divide(lengths, "padded")
            answers[self] = _Lines(lengths, groups, self.agree(len(groups)) - len(groups))
        return answers[self]


class _Holder:
    """Hooks on a module that holds divided layers; they read where documents begin."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.boundaries: torch.Tensor | None = None
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Add the hooks."""
        self._hooks = [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.module.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away, and what they added."""
        for hook in self._hooks:
            hook.remove()
        if (checkpoint := self._checkpoint_func()) is not None and self._is_wrapped(checkpoint):
            self._set_checkpoint(checkpoint.args[0])

    def _begin(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.boundaries = kwargs.get("cu_seq_lens_q")
        # transformers runs a checkpointed layer anew without its hooks. Wrapped here, since it may be set at any time.
        if (checkpoint := self._checkpoint_func()) is not None and not self._is_wrapped(checkpoint):
            self._set_checkpoint(partial(self._checkpoint, checkpoint))

    def _end(self, *_: Any) -> None:
        self.boundaries = None

    def _checkpoint_func(self) -> Any:
        return getattr(self.module, "_gradient_checkpointing_func", None)

    def _set_checkpoint(self, checkpoint: Callable[..., Any]) -> None:
        vars(self.module)["_gradient_checkpointing_func"] = checkpoint

    def _is_wrapped(self, checkpoint: Any) -> bool:
        return isinstance(checkpoint, partial) and checkpoint.func == self._checkpoint

    def _checkpoint(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint the module's forward so that it finds the documents again when it is run anew."""
        boundaries = self.boundaries

        def run(*args: Any) -> Any:
            before, self.boundaries = self.boundaries, boundaries
            try:
                return function(*args)
            finally:
                self.boundaries = before

        return checkpoint(run, *args)


class _Layer:
    """Replaced forward of a layer."""

    def __init__(self, module: nn.Module, holder: _Holder, apart: _Apart) -> None:
        self.module = module
        self.holder = holder
        self.apart = apart
        self.plain: Callable[..., Any] = module.forward
        self.names = list(inspect.signature(self.plain).parameters)

    def install(self) -> None:
        """Put `forward` in the place of the module's own."""
        self.module.forward = self.forward

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self.module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer: a packed row by its documents, any other call as it is."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        boundaries = given.get("cu_seq_lens_q", self.holder.boundaries)
        if boundaries is None:
            return self.plain(*args, **kwargs)
        tokens = given[self.names[0]].shape[1]
        lines = self.apart.lines(boundaries)
        rest = {name: value for name, value in given.items() if name not in _BOUNDS}
        run = partial(self._run, rest, lines.lengths, tokens)
        outs, whole = run_in_lines(run, _states, lines.groups, lines.lengths, lines.missing)
        # A layer returns hidden states, or a tuple of them and what only a cache or a look at its weights would ask for.
        return (whole, *(None for _ in outs[0][1:])) if isinstance(outs[0], tuple) else whole

    def _run(
        self, given: dict[str, Any], lengths: Sequence[int], tokens: int, documents: Sequence[int], *, counts: bool = True
    ) -> Any:
        """Run some documents as lines [B, S], padded on the right without a mask."""
        lines = _cut(given, lengths, documents, tokens)
        device = lines[self.names[0]].device
        self.apart.lengths = torch.tensor([lengths[document] if counts else 0 for document in documents], device=device)
        try:
            return self.plain(**lines)
        finally:
            self.apart.lengths = None


def _states(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _cut(given: dict[str, Any], lengths: Sequence[int], documents: Sequence[int], tokens: int) -> dict[str, Any]:
    """Cut what is given for a row [1, T, ...] into lines [B, S, ...] of some documents."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, tokens):
            return value
        parts = value[0].split(list(lengths))
        return nn.utils.rnn.pad_sequence([parts[document] for document in documents], batch_first=True)

    return {name: cut(value) for name, value in given.items()}
