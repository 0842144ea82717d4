"""Methods of continual learning: for each, what trains in one task, what it does around a step, and the resulting plain model.

Every task starts from the plain model of the one before, so a method with singular vectors computes them anew, and LoRA
begins with a new adapter on the merged weights. Nothing is replayed, and the task is not announced in any other way. All
subspace methods leave the same share of each matrix's directions free, `FREE`.
"""

import contextlib
import io
from collections.abc import Callable

import attrs
import torch
from transformers import LlamaForCausalLM

import forge_algos

FREE = 0.25
"""Share of the singular directions that may change; mini-trainer's unfreeze_rank_ratio, PEFT's 1 - effective_rank."""
LORA_RANK = 16


@attrs.frozen
class Stage:
    """One task under one method."""

    model: torch.nn.Module
    """Model to call; its parameters that require a gradient are trained."""
    finish: Callable[[], dict[str, torch.Tensor]]
    """Function that returns the plain model's weights after the last step."""
    before_step: Callable[[], None] = lambda: None
    after_step: Callable[[], None] = lambda: None
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def full(model: LlamaForCausalLM) -> Stage:
    """Train every weight."""
    return Stage(model, lambda: _state(model))


def lora(model: LlamaForCausalLM) -> Stage:
    """Train PEFT's LoRA on every linear layer but the head, merged at the task's end."""
    settings = forge_algos.AdapterSettings(adapter="lora", lora_r=LORA_RANK, lora_alpha=2.0 * LORA_RANK)
    adapted = forge_algos.adapt(model, settings).model
    return Stage(adapted, lambda: _state(adapted.merge_and_unload()))


def peft_osf(model: LlamaForCausalLM) -> Stage:
    """Train PEFT's `osf` on the same layers, merged at the task's end."""
    from peft import OSFConfig, get_peft_model

    adapted = get_peft_model(model, OSFConfig(target_modules="all-linear", effective_rank=1 - FREE))
    return Stage(adapted, lambda: _state(adapted.merge_and_unload()))


def mini_trainer(model: LlamaForCausalLM) -> Stage:
    """Train mini-trainer's model class with its optimizer wrapper; embeddings, head and norms train too, as there."""
    from mini_trainer import osft_utils

    with contextlib.redirect_stdout(io.StringIO()):
        made = osft_utils.create_osft_model_class(LlamaForCausalLM)(
            model.config, osft_config={}, initialize_osft=False, upcast_dtype=torch.float32, output_dtype=torch.float32
        )
        made.load_state_dict(model.state_dict())
        made.osft_config = osft_utils.auto_generate_target_osft_config(
            made, target_patterns=["self_attn.", "mlp."], rank_ratio=1 - FREE
        )
        made.reinitialize_osft(decompose_existing_weights=True)

    def finish() -> dict[str, torch.Tensor]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            saved = made.prepare_state_dict_for_save(_state(made))
        return {name: saved[name] for name in model.state_dict()}

    return Stage(made, finish, wrap=lambda optimizer: osft_utils.optim_wrapper(optimizer, made))


def _osft(**options: str) -> Callable[[LlamaForCausalLM], Stage]:
    settings = forge_algos.AdapterSettings(adapter="osft", unfreeze_rank_ratio=FREE, **options)

    def begin(model: LlamaForCausalLM) -> Stage:
        names = list(model.state_dict())
        adaptation = forge_algos.adapt(model, settings)

        def finish() -> dict[str, torch.Tensor]:
            state = model.state_dict()
            return {name: adaptation.plain(name, state[name]).detach().clone() for name in names}

        return Stage(adaptation.model, finish, adaptation.before_step, adaptation.after_step)

    return begin


METHODS: dict[str, Callable[[LlamaForCausalLM], Stage]] = {
    "full": full,
    "lora": lora,
    "peft-osf": peft_osf,
    "mini-trainer": mini_trainer,
    "strict/direct": _osft(),
    "strict/factors": _osft(osft_form="factors"),
    "paper": _osft(osft_rule="paper"),
}
