"""Auxiliary loss of a mixture of experts, which balances the load of the experts.

With p the softmax of a router's logits, over all N tokens of all layers, F_e the number of tokens for which expert e is among
the k likeliest, and P_e the sum of p_e: E · Σ_e F_e/N · P_e/N (Fedus et al., arXiv 2101.03961, equations 4 to 6, as
`load_balancing_loss_func` of transformers computes it). A gradient flows through P alone. So once F and N of a whole step are
known, the loss is a sum over micro-batches, however the step is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, decoder, mode, text_config
from forge_algos._parallel import Parallel
from forge_algos.isolation._isolation import REFUSALS, made_up_ids
from forge_algos.settings._moe import MoEAuxLoss

_PROBED_TOKENS = 24


@attrs.frozen(kw_only=True)
class Routers:
    """Routers of a mixture of experts, as its configuration and a made-up row show them."""

    coefficient: float
    """`router_aux_loss_coef`, the run's or the configuration's: weight of the auxiliary loss."""
    layers: int
    experts: int
    """E."""
    top_k: int
    """k: experts of each token."""


def routers_of(model: nn.Module, *, device: torch.device, coefficient: float | None = None) -> tuple[Routers | None, str]:
    """Return the routers whose load is balanced in training, and what was found.

    None, with no reason, for a configuration without a coefficient or with 0; None and the reason for a class that returns no
    router logits, or balances by another formula: where it computes an auxiliary loss itself, ours is compared with it on a
    made-up row.

    Args:
        model: bare or wrapped; where it is divided over ranks, every rank calls this.
        device: where the row goes.
        coefficient: weight of the auxiliary loss; None is the configuration's.
    """
    causal = causal_model(model)
    if coefficient is None:
        coefficient = _setting(causal, "router_aux_loss_coef", "aux_loss_coef")
    top_k = _setting(causal, "num_experts_per_tok")
    name = type(causal).__name__
    if not coefficient:
        return None, ""
    if not top_k:
        return None, f"{name} names no number of experts for a token (num_experts_per_tok)"
    ids, _ = made_up_ids(model, _PROBED_TOKENS, device)
    recorder = _Recorder(model, int(top_k))
    try:
        with mode(model, training=False), torch.no_grad(), recorder.hooked(), recorder.recording(evaluation=True):
            out = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        return None, f"{name} returns no router logits ({type(error).__name__}: {error})"
    if not recorder.found:
        return None, f"{name} returns no router logits"
    (record,) = recorder.found
    theirs = getattr(out, "aux_loss", None)
    if isinstance(theirs, torch.Tensor):
        ours = _balance(record.loads.sum(0).tolist(), record.rows, record.probabilities)
        if not torch.allclose(ours, theirs.to(ours), rtol=1e-2):
            return None, f"{name} balances its experts by another formula ({float(theirs):.4f}, {float(ours):.4f} by ours)"
    layers, experts = record.loads.shape
    found = Routers(coefficient=float(coefficient), layers=layers, experts=experts, top_k=int(top_k))
    return found, f"{layers} layers of {experts} experts, {found.top_k} a token; router_aux_loss_coef {found.coefficient:g}"


def _setting(causal: nn.Module, *names: str) -> float | None:
    """Return the first number of these names that the model or its text configuration has."""
    for owner in (causal, text_config(causal)):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int | float):
                return value
    return None


def _balance(load: Sequence[float], rows: float, probabilities: torch.Tensor) -> torch.Tensor:
    """Compute E · Σ_e F_e/N · P_e/N from F [E], N, and P float[E]."""
    shares = torch.tensor([count / rows for count in load], dtype=probabilities.dtype, device=probabilities.device)
    return (shares * probabilities).sum() * (len(load) / rows)


@attrs.frozen(kw_only=True, eq=False)
class _Record:
    """What the routers did in one forward."""

    loads: torch.Tensor
    """float32[L, E]: tokens for which an expert was among the k likeliest."""
    probabilities: torch.Tensor
    """float32[E]: P, with a gradient."""
    rows: float
    """N: tokens of all layers."""


class _Recorder:
    """Hooks on a model's decoder that ask for its router logits and add them up.

    Places of padding do not count, and a prompt that several completions share counts once for each of them.
    """

    def __init__(self, model: nn.Module, top_k: int) -> None:
        body = decoder(model)
        self._module = causal_model(model) if body is None else body
        self._top_k = top_k
        self._on = False
        self._evaluation = False
        self._weights: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self.found: list[_Record] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Keep the hooks on the decoder inside the block."""
        handles = [
            self._module.register_forward_pre_hook(self._before, with_kwargs=True),
            self._module.register_forward_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def recording(self, *, evaluation: bool = False) -> Iterator[None]:
        """Record the forwards of the block that are made in training mode, or in evaluation mode."""
        self.found, self._on, self._evaluation = [], True, evaluation
        try:
            yield
        finally:
            self._on = False

    def _asked(self) -> bool:
        # A reference that is the same model, without its adapter, runs in evaluation mode.
        return self._on and self._module.training != self._evaluation

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._asked():
            return None
        self._weights, self._rows = None, kwargs.get("kv_rows")
        if self._rows is None and isinstance(mask := kwargs.get("attention_mask"), torch.Tensor) and mask.dim() == 2:
            self._weights = mask
        return args, {**kwargs, "output_router_logits": True}

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._asked():
            return
        logits = [layer for layer in getattr(output, "router_logits", None) or () if layer is not None]
        if not logits:
            return
        loads, sums, rows = [], [], 0.0
        # By the places of a layer, which most models have alike in all: one wait for the device a forward, not one a layer.
        weighted: dict[int, tuple[torch.Tensor | None, float]] = {}
        for layer in logits:
            probabilities = torch.softmax(layer.flatten(0, -2), dim=-1, dtype=torch.float32)
            chosen = probabilities.detach().topk(self._top_k, dim=-1).indices
            if len(chosen) not in weighted:
                weighted[len(chosen)] = self._weights_of(layer.device, len(chosen))
            weights, count = weighted[len(chosen)]
            ones = torch.ones(len(chosen), device=layer.device) if weights is None else weights
            load = torch.zeros(probabilities.shape[-1], device=layer.device)
            loads.append(load.scatter_add_(0, chosen.flatten(), ones.repeat_interleave(self._top_k)))
            sums.append((probabilities if weights is None else probabilities * weights[:, None]).sum(0))
            rows += count
        self.found.append(_Record(loads=torch.stack(loads), probabilities=torch.stack(sums).sum(0), rows=rows))

    def _weights_of(self, device: torch.device, places: int) -> tuple[torch.Tensor | None, float]:
        """Return the weight of each place that a router saw, None where all are 1, and their sum."""
        if self._rows is not None:
            # Not by bincount, which makes the host wait for a GPU: it looks for the largest.
            rows = self._rows.to(device)
            seen = torch.zeros(places, device=device).index_add_(0, rows, torch.ones(len(rows), device=device))
            return seen, float(len(rows))
        if self._weights is None:
            return None, float(places)
        weights = self._weights
        if weights.dim() == 2:
            # A mask covers cached places (a prefix) too, which no router sees.
            weights = weights[:, -(places // weights.shape[0]) :].flatten()
        return weights.to(device, torch.float32), float(weights.sum())


class RouterLoss:
    """The auxiliary loss of one training run; `train` calls it at each micro-batch."""

    def __init__(self, model: nn.Module, routers: Routers, kind: MoEAuxLoss, parallel: Parallel) -> None:
        self.routers = routers
        self.kind = kind
        self._parallel = parallel
        self._recorder = _Recorder(model, routers.top_k)
        self.hooked = self._recorder.hooked
        self.recording = self._recorder.recording
        self._totals: list[float] | None = None
        self._batches = 1
        self._loads: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        """Each micro-batch's part of the loss, before the coefficient."""

    def begin(self, mine: Sequence[float], forwards: Sequence[Callable[[], object]], device: torch.device) -> None:
        """Begin a step: what its terms need to know of the whole is measured first.

        Args:
            mine: terms of this rank's micro-batches that are run.
            forwards: runs each of them.
            device: whose random state is as before afterwards, so that noise is the same in both forwards.
        """
        self._totals, self._loads, self.values = None, [], []
        if self.kind == "trl":
            (batches,) = self._parallel.sum([float(sum(count > 0 for count in mine))])
            self._batches = int(batches)
        elif len(mine) > 1:
            numbers = [0.0] * self._width
            devices: dict[str, Any] = (
                {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
            )
            with torch.no_grad(), torch.random.fork_rng(**devices):
                for count, forward in zip(mine, forwards, strict=True):
                    with self._recorder.recording():
                        forward()
                    if count:
                        numbers = [a + b for a, b in zip(numbers, self._numbers(), strict=True)]
            self._totals = self._parallel.sum(numbers)

    def term(self, *, counts: bool) -> torch.Tensor:
        """Return the last forward's part of the auxiliary loss, with its coefficient; float[].

        Args:
            counts: whether this rank's micro-batch has anything to learn.

        Raises:
            LossError: the forward did not run the routers.
        """
        record = self._record()
        if self.kind == "trl":
            value = _balance(record.loads.sum(0).tolist(), record.rows, record.probabilities) / self._batches
            if counts:
                self._loads.append(record.loads)
        else:
            if self._totals is None:
                self._totals = self._parallel.sum(self._numbers() if counts else [0.0] * self._width)
            *loads, rows = self._totals
            value = _balance(torch.tensor(loads).view(-1, self.routers.experts).sum(0).tolist(), rows, record.probabilities)
        if counts:
            self.values.append(value.detach())
        return value * self.routers.coefficient

    def load(self) -> tuple[tuple[float, ...], ...]:
        """Return each layer's share of the step's tokens by expert: L tuples of E."""
        if self._totals is not None:
            loads = torch.tensor(self._totals[:-1]).view(-1, self.routers.experts)
        else:
            own = (
                [float(count) for count in torch.stack(self._loads).sum(0).flatten()]
                if self._loads
                else [0.0] * (self._width - 1)
            )
            loads = torch.tensor(self._parallel.sum(own)).view(-1, self.routers.experts)
        shares = loads / loads.sum(1, keepdim=True)
        return tuple(tuple(round(share, 6) for share in layer) for layer in shares.tolist())

    @property
    def _width(self) -> int:
        return self.routers.layers * self.routers.experts + 1

    def _record(self) -> _Record:
        found = self._recorder.found
        if not found:
            raise LossError(
                "the auxiliary loss of the routers (moe_aux_loss) needs a forward of the model in training mode for each "
                "micro-batch, and this objective made none: use moe_aux_loss=off"
            )
        if len(found) == 1:
            return found[0]
        return _Record(
            loads=torch.stack([record.loads for record in found]).sum(0),
            probabilities=torch.stack([record.probabilities for record in found]).sum(0),
            rows=sum(record.rows for record in found),
        )

    def _numbers(self) -> list[float]:
        record = self._record()
        return [*record.loads.flatten().tolist(), record.rows]


def make_router_loss(
    model: nn.Module, kind: MoEAuxLoss, *, device: torch.device, parallel: Parallel, coefficient: float | None = None
) -> RouterLoss | None:
    """Make the auxiliary loss of a model's routers; None where there is none, or with "off"."""
    if kind == "off":
        return None
    routers, _ = routers_of(model, device=device, coefficient=coefficient)
    return None if routers is None else RouterLoss(model, routers, kind, parallel)
