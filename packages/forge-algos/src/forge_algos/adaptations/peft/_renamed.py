"""Names of adapters → those that PEFT would not find again where it reads them.

PEFT reads the LoRA of a model as transformers reads its weights, with the names that older files have, and renames what is
called so (0.21). Some rules of transformers (5.23) fit names of the model itself too: Laguna's `mlp.shared_expert.` fits
`mlp.shared_experts`, as its dot stands for any sign, and Inkling 2's `sconv.weight_proj` the layer of that name. PEFT would
write such an adapter, read it back under a name that no layer has, and go on with its first values, with a warning.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_algos._errors import AdapterError

if TYPE_CHECKING:
    from peft import PeftModel


def renamed_targets(model: nn.Module, config: Any, names: Sequence[str]) -> list[str]:
    """Return the linear layers among `names` whose adapters PEFT reads under another name.

    Args:
        model: the base.
        config: PEFT's configuration class of the adapter.
        names: full names of linear layers.
    """
    keys = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    read = _read(model, config(task_type="CAUSAL_LM"), keys)
    return [name for key, name in keys.items() if key not in read]


def check_read_back(model: "PeftModel", name: str = "default") -> None:
    """Refuse an adapter of which PEFT would not read back every tensor.

    Raises:
        AdapterError: PEFT would read one of its tensors under another name.
    """
    prefix: Any = model.base_model.prefix  # "lora_", of the names of all that PEFT adds
    keys = [key.replace(f".{name}", "") for key, _ in model.named_parameters() if f".{prefix}" in key]
    lost = sorted(set(keys) - _read(model, model.peft_config[name], keys))
    if lost:
        raise AdapterError(
            f"target_modules: PEFT would write the tensor {lost[0]} ({len(lost)} such) and read it back under another name: it "
            f"fits a rule that transformers has for older files of {model.config.model_type}. Name other targets"
        )


def _read(model: nn.Module, config: Any, keys: Iterable[str]) -> set[str]:
    """Return the names under which PEFT would read tensors of an adapter called `keys`."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:
        return set(keys)
    # Two dimensions, as PEFT's rules for experts ask of what they put together.
    tensors = {key: torch.empty(1, 1, device="meta") for key in keys}
    return set(convert_peft_adapter_state_dict_for_transformers(model, config, tensors))
