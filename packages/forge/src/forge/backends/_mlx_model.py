"""A PEFT model → mlx-lm's model with the same LoRA weights, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from forge._errors import SettingsError


def load_base(path: str, folder: Path, dtype: str) -> Any:
    """Load a model with mlx-lm, frozen, in `dtype`.

    transformers 5 writes `rope_theta` under `rope_parameters`, where mlx-lm does not look: it would take 10,000 in silence.
    So the configuration is handed over with it at the top, in `folder`, where the other files are links.

    Raises:
        SettingsError: mlx-lm has no such architecture.

    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(path).glob("*.safetensors"):
        link = folder / file.name
        if not link.exists():
            link.symlink_to(file.resolve())
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", {name: value for name, value in rope.items() if name != "rope_theta"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        model, _ = load_model(folder)
    except ValueError as error:
        raise SettingsError(f"model_path {path}: mlx-lm cannot load it: {error} Choose backend=forge.") from error
    model.set_dtype(mx.float32 if dtype == "float32" else mx.bfloat16)
    model.freeze()
    return model


def peft_layers(model: Any) -> dict[str, Any]:
    """Return the LoRA layers of a PEFT model by the names that their modules have without it."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and "default" in getattr(module, "lora_A", ())
    }


def attach(model: Any, layers: dict[str, Any], dropout: float) -> None:
    """Put mlx-lm's LoRA layers, with PEFT's weights, in the places that PEFT's have.

    PEFT's A is [r, in] and B [out, r]; mlx-lm's are the transposes.

    Raises:
        SettingsError: mlx-lm's model has no linear layer of that name and shape.

    """
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear

    modules, found = dict(model.named_modules()), []
    for name, layer in layers.items():
        linear = modules.get(name)
        shape = (layer.out_features, layer.in_features)
        if not isinstance(linear, nn.Linear) or tuple(linear.weight.shape) != shape:
            raise SettingsError(
                f"target_modules: mlx-lm has no linear layer {name} of shape {list(shape)}: choose backend=forge."
            )
        made: Any = LoRALinear.from_base(linear, r=layer.r["default"], dropout=dropout, scale=layer.scaling["default"])
        made.lora_a = mx.array(_numpy(layer.lora_A["default"].weight).T)
        made.lora_b = mx.array(_numpy(layer.lora_B["default"].weight).T)
        found.append((name, made))
    model.update_modules(tree_unflatten(found))


def bring_back(model: Any, layers: dict[str, Any]) -> None:
    """Write mlx-lm's LoRA weights into PEFT's layers."""
    import torch

    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, layer in layers.items():
            layer.lora_A["default"].weight.copy_(torch.from_numpy(np.array(modules[name].lora_a.T)))
            layer.lora_B["default"].weight.copy_(torch.from_numpy(np.array(modules[name].lora_b.T)))


def check_logits(model: Any, torch_model: Any, ids: list[int], tolerance: float, when: str) -> float:
    """Compare the logits of both models on a row.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        SettingsError: they are further apart than `tolerance`.

    """
    import mlx.core as mx
    import torch

    with torch.no_grad():
        expected = torch_model(input_ids=torch.tensor([ids])).logits[0].float().numpy()
    found = np.array(model(mx.array([ids])).astype(mx.float32))[0]
    apart = float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))
    if not apart <= tolerance:
        raise SettingsError(
            f"{when}, mlx-lm's model computes other logits than transformers' ({apart:.2g} of the largest, where {tolerance:g} "
            "is allowed): it reads this architecture's configuration otherwise. Choose backend=forge."
        )
    return apart


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
