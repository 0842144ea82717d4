"""Whole modules and rows of new tokens that train beside an adapter, by PEFT's own wrappers.

PEFT's layer for token rows reads the weight of the layer below it past that layer's hooks, in which a model that is divided
over ranks gathers it; here that layer is called, and the rows are put into what it returns. The numbers are PEFT's.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._counted import counted
from forge_algos._errors import AdapterError
from forge_algos._modules import embeddings, head
from forge_algos.adaptations.base._targets import matches, score
from forge_algos.adaptations.peft._target_names import short_names
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Arguments = dict[str, Any]


def arguments_of(model: nn.Module, settings: AdapterSettings, targets: Sequence[str], new_tokens: Sequence[int]) -> Arguments:
    """Return PEFT's arguments for the modules and rows that train beside an adapter.

    They are the modules of `modules_to_save`, and the new tokens' rows of the embedding and the head, where these are not among
    them. A tied embedding and head stay one weight.

    Raises:
        AdapterError: a name matches nothing, or a module that holds targets or is trained already; PEFT would not keep a tie.
    """
    whole = resolve(model, settings.modules_to_save or (), targets)
    for name in whole:
        if any(not p.is_floating_point() for p in model.get_submodule(name).parameters()):
            raise AdapterError(
                f"modules_to_save: {name} is quantised (quant_type={settings.quant_type}), and codes cannot train: leave it "
                "out, or take adapter=lora"
            )
    ends = {name: module for name, module in model.named_modules() if module in (embeddings(model), head(model))}
    tied = _tied(model)
    found: Arguments = {}
    if tied and any(name in ends for name in whole):
        if ADAPTERS[settings.adapter].peft != "LoraConfig":
            raise AdapterError(
                f"modules_to_save: {' and '.join(ends)} share one weight, and PEFT's {settings.adapter} would train only one "
                "of them: take adapter=lora, or leave them out"
            )
        # Under the embedding's name; PEFT ties the head to its copy.
        whole = [name for name in whole if name not in ends] + [embedding_name(model)]
        found["ensure_weight_tying"] = True
        ends = {}
    if whole:
        found["modules_to_save"] = short_names(model, whole)
    rows = [name for name in ends if name not in whole and not (tied and ends[name] is head(model))]
    if new_tokens and rows:
        if ADAPTERS[settings.adapter].peft != "LoraConfig":
            raise AdapterError(
                f"new tokens: PEFT trains their rows of {' and '.join(short_names(model, rows))} beside LoRA, and not beside "
                f"{settings.adapter}: name them in modules_to_save, or take adapter=lora"
            )
        for name in rows:
            if getattr(ends[name], "bias", None) is not None:
                raise AdapterError(
                    f"new tokens: the head {name} has a bias, which PEFT's trained rows leave out: set modules_to_save to "
                    f"{', '.join(short_names(model, list(ends)))}, which trains them whole"
                )
        found["trainable_token_indices"] = {name: list(new_tokens) for name in short_names(model, rows)}
    return found


def describe(model: nn.Module, arguments: Arguments) -> list[str]:
    """Return a line for the log on what trains beside the adapter."""
    lines = []
    if names := arguments.get("modules_to_save"):
        tied = " (and the head, which is tied to it)" if arguments.get("ensure_weight_tying") else ""
        lines.append(f"trained whole beside it: {', '.join(names)}{tied}")
    if rows := arguments.get("trainable_token_indices"):
        tied = " (and the head, which is tied to it)" if _tied(model) else ""
        lines.append(
            f"trained beside it: the rows of {counted(len(next(iter(rows.values()))), 'new tokens')} of {', '.join(rows)}{tied}"
        )
    return lines


@contextmanager
def readable(model: nn.Module, arguments: Arguments) -> Iterator[None]:
    """Let PEFT read divided weights inside the block, where it attaches; collective.

    Raises:
        AdapterError: the weights are only placeholders, as under hsdp; a divided module to copy has modules inside.
    """
    rows, whole = arguments.get("trainable_token_indices") or {}, arguments.get("modules_to_save") or ()
    modules = {name: module for name, module in model.named_modules() if any(matches(each, name) for each in (*rows, *whole))}
    parameters = [p for module in modules.values() for p in module.parameters()]
    if any(not hasattr(p, "ds_id") and 0 in p.stride() and p.numel() for p in parameters):
        raise AdapterError(
            "rows of new tokens, and modules_to_save, are read as an adapter begins, and strategy=hsdp has the head nowhere "
            "whole then: use strategy=fsdp2, ddp or zero2"
        )
    with ExitStack() as stack:
        if any(hasattr(p, "ds_id") for p in parameters):
            # Partitioned by ZeRO-3, so DeepSpeed is loaded.
            stack.enter_context(sys.modules["deepspeed"].zero.GatheredParameters(parameters))
        originals = {
            name: module for name, module in modules.items() if any(isinstance(p, DTensor) for p in module.parameters())
        }
        for name, module in originals.items():
            _replace(model, name, _whole(name, module))
        try:
            yield
        finally:
            for name, module in originals.items():
                _restore(model, name, module)
                module.requires_grad_(requires_grad=False)


def prepare(model: nn.Module) -> None:
    """Let what PEFT wrapped compute beside layers of any dtype, divided or not.

    Copied modules become float32, as all that trains, and give what the layers around them take.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            module.forward = partial(_with_rows, module)
        elif isinstance(module, ModulesToSaveWrapper):
            for copied in module.modules_to_save.values():
                _in_float32(copied, next(module.original_module.parameters()).dtype)


def read_onto(base: "PreTrainedModel", folder: str, name: str) -> "PeftModel":
    """Read an adapter with trained rows or copied modules onto a divided base; collective."""
    from peft import PeftConfig, PeftModel

    config: Any = PeftConfig.from_pretrained(folder)
    arguments = {key: getattr(config, key, None) for key in ("modules_to_save", "trainable_token_indices")}
    with readable(base, arguments):
        model = PeftModel.from_pretrained(base, folder, adapter_name=name)
    prepare(model)
    return model


def _with_rows(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the layer below, with the trained rows in place of its own.

    Of an embedding `x` is int64[B, S]; of a head float[B, S, D].
    """
    base = layer.get_base_layer()
    out = base(x)
    if layer.disable_adapters or layer.merged or "forward" in vars(base):
        # In the last case losses are computed in the head's place, with the rows in its weight.
        return out
    for name in layer.active_adapters:
        rows = layer.trainable_tokens_delta[name]
        ids = layer.token_indices[name]
        if (order := sorted(range(len(ids)), key=ids.__getitem__)) != list(range(len(ids))):
            rows, ids = rows[order], sorted(ids)  # another trainer's stand in any order
        index = torch.tensor(ids, device=out.device)
        if isinstance(base, nn.Embedding):
            place = torch.searchsorted(index, x).clamp(max=len(index) - 1)
            found = nn.functional.embedding(place, rows).to(out.dtype) * getattr(base, "embed_scale", 1.0)
            out = torch.where((index[place] == x)[..., None], found.to(out.dtype), out)
        else:
            out = out.index_copy(-1, index, nn.functional.linear(x, rows.to(x.dtype)).to(out.dtype))
    return out


def resolve(model: nn.Module, names: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the full names of the modules that `modules_to_save` selects."""
    known = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    found: dict[str, None] = {}
    for wanted in names:
        selected = [name for name in known if matches(wanted, name)]
        if not selected:
            close = get_close_matches(wanted, [*{name.rpartition(".")[2] for name in known}], n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise AdapterError(f"modules_to_save: {wanted} matches no module of {type(model).__name__} with parameters.{hint}")
        for name in selected:
            if model.get_submodule(name) is score(model):
                raise AdapterError(f"modules_to_save: {name} is trained whole beside the adapters already; leave it out")
            inside = [target for target in targets if f"{target}.".startswith(f"{name}.")]
            if inside:
                raise AdapterError(
                    f"modules_to_save: {name} would be trained whole, and {inside[0]} is a target of the adapter: name other "
                    "target_modules, or leave it out"
                )
        found |= dict.fromkeys(selected)
    return list(found)


def _tied(model: nn.Module) -> bool:
    top, table = head(model), embeddings(model)
    return top is not None and table is not None and top.weight is table.weight


def embedding_name(model: nn.Module) -> str:
    """Return the full name of the input embedding."""
    return _name(model, embeddings(model))


def _name(model: nn.Module, wanted: nn.Module | None) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _whole(name: str, module: nn.Module) -> nn.Module:
    """Return a plain module with the whole weights of a divided one; collective."""
    if next(module.children(), None) is not None:
        raise AdapterError(f"modules_to_save: {name} has modules inside, and the model is divided: name these")
    plain_class: Any = next(kind for kind in type(module).__mro__ if "FSDP" not in kind.__name__)
    plain = object.__new__(plain_class)
    nn.Module.__init__(plain)
    # Sizes and options, and not what divides the module.
    kept = {key: value for key, value in vars(module).items() if value is None or isinstance(value, int | float | str)}
    vars(plain).update({key: value for key, value in kept.items() if key not in vars(plain)})
    for key, value in module.named_buffers(recurse=False):
        plain.register_buffer(key, value)
    if getattr(module, "bias", module) is None:
        plain.register_parameter("bias", None)
    for key, parameter in module.named_parameters(recurse=False):
        tensor: Any = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        setattr(plain, key, nn.Parameter(whole.clone(), requires_grad=False))
    return plain


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _restore(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a divided module back, into PEFT's wrapper where there is one by now."""
    parent, _, own = name.rpartition(".")
    holder: Any = model.get_submodule(parent)
    wrapper = getattr(holder, own)
    if hasattr(wrapper, "token_adapter"):
        wrapper.token_adapter.base_layer = module
    elif hasattr(wrapper, "modules_to_save"):
        wrapper.original_module = module
    else:
        setattr(holder, own, module)


def _in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        return
    module.float()
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _module, _args, out: out.to(dtype))
    elif isinstance(module, nn.Linear):
        module.register_forward_pre_hook(lambda _module, args: (args[0].float(), *args[1:]))
        module.register_forward_hook(lambda _module, _args, out: out.to(dtype))
