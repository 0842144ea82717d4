"""Decoder whose packed rows are cut over ranks: the row is whole outside, in parts inside."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forge_dist._errors import StrategyError
from forge_dist.context._attention import ARGUMENT, Part, over_ranks
from forge_dist.context._cut import cut_row
from forge_dist.context._rows import RowsOverRanks
from forge_dist.loading._request import LoadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = "rows_over_ranks"
"""Attribute of a model whose rows are cut: a RowsOverRanks, by which what follows the decoder can be divided too."""
_SUFFIX = "_over_ranks"
"""What the name of the attention has behind the caller's."""
_TOKENS = ("last_hidden_state", "hidden_states", "router_logits")
"""Outputs of a decoder that have a row for each token."""


class ContextParallel:
    """R ranks that share each packed row.

    Args:
        mesh: of one dimension; the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        self._rank = mesh.get_local_rank()

    def request(self, request: LoadRequest) -> LoadRequest:
        """Return the request with an attention that gathers keys and values."""
        assert request.attention_function is not None
        return attrs.evolve(
            request, attention=f"{request.attention}{_SUFFIX}", attention_function=over_ranks(request.attention_function)
        )

    def divide(self, model: "PreTrainedModel", model_path: str) -> None:
        """Have the decoder of `model` cut the packed rows that it is given.

        A row is packed if it comes with `cu_seq_lens_q`; any other call is made whole on every rank. Hidden states and router
        logits come back whole, with gradients that are exact for the sum of what the ranks compute.

        Under `ROWS` the model gets a RowsOverRanks, by which what is computed from the hidden states can be divided too.

        Raises:
            StrategyError: the model has no decoder that could be cut.
        """
        body: Any = model.get_decoder()
        # A decoder with a head of its own is a causal model in another one, as Llama 4's is.
        ask = getattr(body, "get_output_embeddings", None)
        if not isinstance(body, nn.Module) or body is model or (ask is not None and ask() is not None):
            raise StrategyError(
                f"model_path {model_path}: {type(model).__name__} names no decoder whose rows could be cut: leave cp_size out"
            )
        body.forward = self._cutting(body.forward)
        setattr(model, ROWS, RowsOverRanks(self._group))

    def _cutting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(plain).parameters)

        @wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if given.get("cu_seq_lens_q") is None:
                return plain(*args, **kwargs)
            states = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
            tokens = states.shape[1]
            row = _padded(given, tokens, 2 * self._ranks)
            part = self._part(row, states.device)
            return _whole(plain(**_own(row, part)), part, tokens)

        return forward

    def _part(self, row: dict[str, Any], device: torch.device) -> Part:
        shared = row.get("kv_rows")
        cut = cut_row(
            row["cu_seq_lens_q"].tolist(),
            ranks=self._ranks,
            rank=self._rank,
            key_ends=None if shared is None else row["cu_seq_lens_k"].tolist(),
            kv_rows=None if shared is None else shared.cpu(),
        )
        return Part(cut, self._group, device)


def _padded(given: dict[str, Any], tokens: int, least: int) -> dict[str, Any]:
    """Append a document to a row of fewer than `least` tokens, so that each rank has some."""
    row = dict(given)
    if row.get("position_ids") is None:
        device = row["cu_seq_lens_q"].device
        row["position_ids"] = torch.arange(tokens, device=device)[None]
    missing = least - tokens
    if missing <= 0:
        return row
    for name, dim in _DIMS.items():
        value = row.get(name)
        if isinstance(value, torch.Tensor) and value.shape[dim] == tokens:
            row[name] = torch.cat([value, value.narrow(dim, 0, 1).repeat_interleave(missing, dim)], dim)
    ends, key_ends, shared = row["cu_seq_lens_q"], row.get("cu_seq_lens_k"), row.get("kv_rows")
    row["cu_seq_lens_q"] = torch.cat([ends, ends[-1:] + missing])
    if shared is not None and key_ends is not None:
        row["kv_rows"] = torch.cat([shared, torch.arange(tokens, least).to(shared)])
        row["cu_seq_lens_k"] = torch.cat([key_ends, key_ends[-1:] + missing])
    return row


_DIMS = {
    "input_ids": -1,
    "position_ids": -1,
    "token_type_ids": -1,
    "mm_token_type_ids": -1,
    "inputs_embeds": 1,
    "per_layer_inputs": 1,
}
"""Arguments of a decoder that have a place for each token, and the dimension in which."""


def _own(row: dict[str, Any], part: Part) -> dict[str, Any]:
    """Return the arguments of this rank's tokens."""
    cut, own = part.cut, dict(row)
    for name, dim in _DIMS.items():
        value = own.get(name)
        if isinstance(value, torch.Tensor) and value.shape[dim] == len(part.order):
            own[name] = value.index_select(dim, part.mine)
    device = part.mine.device
    own["cu_seq_lens_q"] = torch.tensor(cut.queries, dtype=torch.int32, device=device)
    own["cu_seq_lens_k"] = torch.tensor(cut.keys, dtype=torch.int32, device=device)
    own["max_length_q"], own["max_length_k"] = cut.longest_queries, cut.longest_keys
    own.pop("kv_rows", None)
    own[ARGUMENT] = part
    return own


def _whole(output: Any, part: Part, tokens: int) -> Any:
    """Gather what a decoder returns for this rank's tokens; the row's own `tokens` of it."""

    def gathered(states: torch.Tensor) -> torch.Tensor:
        # Router logits are [t, E] in some models and [1, t, E] in others.
        flat = states if states.shape[0] == len(part.mine) and states.dim() == 2 else states[0]
        whole = part.whole(flat)[:tokens]
        return whole if flat is states else whole[None]

    for name in _TOKENS:
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            setattr(output, name, gathered(value))
        elif isinstance(value, tuple):
            setattr(output, name, tuple(each if each is None else gathered(each) for each in value))
    return output
