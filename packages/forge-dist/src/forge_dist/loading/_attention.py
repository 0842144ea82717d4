"""Attention functions of callers, registered under names for `attn_implementation`."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from forge_dist._errors import ModelError

AttentionFunction = Callable[..., tuple[Any, Any]]
"""Attention with transformers' signature.

(module, query[1, H, T, D], key, value, attention_mask, scaling, dropout, **kwargs) → (out[1, T, H, D], weights | None).
"""

_registered: dict[str, AttentionFunction] = {}


def _mask_for_unpacked_calls(**call: Any) -> Any:
    """Build sdpa's mask for a padded batch or a cache; None for a packed row.

    A packed row has no 2-D mask and as many keys as queries: the function finds the documents by itself, and the mask that
    transformers would build is [T, T] and dense. Without its mask a padded batch or a cache would attend to padding.
    """
    if call.get("attention_mask") is None and call["q_length"] == call["kv_length"]:
        return None
    from transformers.masking_utils import sdpa_mask

    call["allow_is_causal_skip"] = False
    return sdpa_mask(**call)


def register_attention(name: str | None, function: AttentionFunction | None) -> None:
    """Register `function` under `name`; without one, check that transformers knows `name`.

    Without either, the choice is left to transformers.

    Raises:
        ModelError: a function under a name of transformers', where it would change every other model of the process; an unknown
            name (transformers would fetch a kernel of that name from the hub).
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
    AttentionMaskInterface.register(name, _mask_for_unpacked_calls)
    _registered[name] = function
    _skip_search_for_documents()


def _skip_search_for_documents() -> None:
    """Keep transformers from searching rows for documents, of which our attention needs no mask.

    It looks in every forward without a mask and a cache, and to look at a result of the device the host waits for all that the
    device still has to do, once a micro-batch.
    """
    from transformers import masking_utils

    prepare: Any = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if prepare is None or hasattr(prepare, "__wrapped__"):
        return
    names = list(signature(prepare).parameters)
    # Its name as of transformers 5.24, and before.
    cache = "cache" if "cache" in names else "past_key_values"

    @wraps(prepare)
    def without_search(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        ours = getattr(given.get("config"), "_attn_implementation", None) in _registered
        if ours and given.get("attention_mask") is None and given.get(cache) is None:
            given["position_ids"] = None
        return prepare(**given)

    masking_utils._preprocess_mask_arguments = without_search
