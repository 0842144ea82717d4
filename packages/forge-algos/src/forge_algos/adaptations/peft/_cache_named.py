"""Virtual tokens of a PEFT that knows keys and values as `past_key_values` alone.

transformers 5.24 calls them `cache` (its `deprecate_kwarg` at each model's forward). While a model of PEFT 0.21 generates,
a prefix would be left out, and a prompt put in anew before each token.
"""

import inspect
from functools import partial
from typing import Any

from torch import nn

from forge_algos._cache_argument import CACHE_ARGUMENTS, cache_argument
from forge_algos._modules import unwrap, virtual_tokens


def name_cache_for_peft(model: nn.Module) -> None:
    """Let PEFT's virtual tokens and the model name keys and values each in its own way.

    A model is left as it is where it has no virtual tokens, or calls them as PEFT does.

    Args:
        model: PeftModel, whose prefix or prompt is then there while it generates; or any other.

    """
    before, now = CACHE_ARGUMENTS
    if cache_argument() == before or not virtual_tokens(model):
        return
    adapted: Any = unwrap(model)
    base = adapted.base_model
    known = inspect.signature(base.forward)
    if now not in known.parameters:
        return
    base.register_forward_pre_hook(_named_as_now, with_kwargs=True)
    if adapted.peft_config[adapted.active_adapter].task_type == "SEQ_CLS":
        # PEFT gives a prefix to a sequence classifier only where its forward names the argument.
        more = inspect.Parameter(before, inspect.Parameter.KEYWORD_ONLY, default=None)
        named, rest = (
            [each for each in known.parameters.values() if (each.kind == each.VAR_KEYWORD) == last] for last in (False, True)
        )
        forward: Any = partial(base.forward)
        forward.__signature__ = known.replace(parameters=[*named, more, *rest])
        base.forward = forward
    # Only a model that generates has it.
    prepare = getattr(type(adapted), "prepare_inputs_for_generation", None)
    if prepare is not None and now not in prepare.__code__.co_consts:
        adapted.base_model_prepare_inputs_for_generation = partial(
            _prepare_as_before, adapted.base_model_prepare_inputs_for_generation
        )


def _named_as_now(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Give a forward what PEFT passes; where both are there, PEFT's has the virtual tokens."""
    before, now = CACHE_ARGUMENTS
    if before not in kwargs:
        return None
    return args, {**{name: value for name, value in kwargs.items() if name != before}, now: kwargs[before]}


def _prepare_as_before(prepare: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the inputs of a step with the name that PEFT looks for."""
    before, now = CACHE_ARGUMENTS
    return {before if name == now else name: value for name, value in prepare(*args, **kwargs).items()}
