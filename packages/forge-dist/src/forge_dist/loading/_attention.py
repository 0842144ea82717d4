"""An attention function of the caller's → a name that transformers models accept as `attn_implementation`."""

from collections.abc import Callable
from typing import Any

from forge_dist._errors import ModelError

AttentionFunction = Callable[..., tuple[Any, Any]]
"""transformers' signature: (module, query[1, H, T, D], key, value, attention_mask, scaling, dropout, **kwargs) → (out[1, T, H, D], weights | None)."""

_registered: dict[str, AttentionFunction] = {}


def _mask_of_ordinary_calls(**call: Any) -> Any:
    """The mask that sdpa would get, where there is something to mask that the function cannot see by itself.

    A packed row brings no 2-D mask and as many keys as queries: the function finds the documents by itself, and the mask that
    transformers would build is [T, T] and dense. A padded batch or a cache must keep its mask, or padding would be attended to.
    """
    if call.get("attention_mask") is None and call["q_length"] == call["kv_length"]:
        return None
    from transformers.masking_utils import sdpa_mask

    call["allow_is_causal_skip"] = False
    return sdpa_mask(**call)


def settle_attention(name: str | None, function: AttentionFunction | None) -> None:
    """Register `function` under `name`, or see that transformers knows `name` where there is no function (None: left to transformers).

    Raises:
        ModelError: a function under a name that belongs to transformers, where it would change every other model of the process;
            a name that is unknown (transformers would fetch a kernel of that name from the hub).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    known = {"eager", *AttentionInterface().valid_keys()}
    if function is None:
        if name is not None and name not in known:
            raise ModelError(f"attention {name!r} is unknown without an attention_function; known: {', '.join(sorted(known))}")
        return
    if name is None or not name.isidentifier() or (name in known and name not in _registered):
        raise ModelError(f"attention {name!r} cannot name an attention_function: use a name of your own, such as 'documents'")
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _mask_of_ordinary_calls)
    _registered[name] = function
