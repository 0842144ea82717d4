"""Hooks that refuse a forward in which documents of a packed row could see each other.

transformers isolates the documents of a row only without a KV cache and without a 2-D attention mask: with one, logits are off
by 1.6 (transformers 5.23, sdpa and eager), silently. `use_cache` left alone means the config's, which is True nearly
everywhere. A row whose completions share a prompt (`kv_rows`) needs an attention that reads `kv_rows`, too: any other silently
leaves the prompt out.
"""

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forge_algos._cache_argument import cache_argument, has_cache
from forge_algos._errors import PackedBatchError
from forge_algos._modules import causal_model, decoder, virtual_tokens
from forge_algos.isolation._prompt_sharing import require_sharing


class PackedGuard:
    """The hooks of `guard_packed`; `remove()` or the end of a `with` block removes them."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hooks; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "PackedGuard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def guard_packed(model: nn.Module) -> PackedGuard:
    """Refuse forwards of `model` or its decoder with a packed row beside a KV cache or 2-D mask.

    A row is packed if `cu_seq_lens_q` names two documents or more, or if it is a single row whose `position_ids` start anew
    (looked at on the CPU only: elsewhere that would wait for the device), or if it comes with `kv_rows`; then the model must
    also have passed `shares_prompts`. `train` and `evaluate` install this by themselves.

    Returns:
        PackedGuard: call its `remove()`, or use it in a `with` block.

    Raises:
        PackedBatchError: from the guarded forward.
    """
    causal = causal_model(model)
    modules = [module for module in (model, causal, decoder(model)) if module is not None]
    return PackedGuard(
        [module.register_forward_pre_hook(_hook(module, model), with_kwargs=True) for module in dict.fromkeys(modules)]
    )


def _hook(module: nn.Module, whole: nn.Module) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    names = list(inspect.signature(module.forward).parameters)
    outermost = virtual_tokens(module) > 0

    def refuse(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        shares = given.get("kv_rows") is not None
        if shares:
            require_sharing(whole)
        if not shares and not _is_packed(given.get("cu_seq_lens_q"), given.get("position_ids")):
            return
        if outermost:
            raise PackedBatchError(
                "a packed row came to a model with virtual tokens, which stand before each of its documents: the row has no "
                "place for them; forge_algos.objectives lays such rows out one document a line"
            )
        mask = given.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            raise PackedBatchError(
                f"a packed row came with a 2-D attention_mask {list(mask.shape)}: its documents would see each other; "
                "pass no mask, the positions and cu_seq_lens say where documents begin"
            )
        use_cache = given.get("use_cache")
        default = use_cache is None
        if default:
            use_cache = getattr(getattr(module, "config", None), "use_cache", False)
        if use_cache or has_cache(given):
            raise PackedBatchError(
                f"a packed row came with a KV cache (use_cache={'left at its default, ' if default else ''}{use_cache}): "
                f"its documents would see each other; pass use_cache=False and no {cache_argument()}"
            )

    return refuse


def _is_packed(cu_seq_lens: Any, position_ids: Any) -> bool:
    if isinstance(cu_seq_lens, torch.Tensor) and cu_seq_lens.numel() > 2:
        return True
    if not isinstance(position_ids, torch.Tensor) or position_ids.device.type != "cpu" or position_ids.dim() > 2:
        return False
    if position_ids.dim() == 2 and position_ids.shape[0] != 1:
        return False
    return bool((position_ids.reshape(-1)[1:] == 0).any())
