"""What the tests of divided exports do on each rank: load by a strategy, change the weights, wrap."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch

CPU = torch.device("cpu")

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
DIVIDED = ["ddp", "fsdp2", *(["zero1", "zero3"] if DEEPSPEED else [])]
_needs_deepspeed = pytest.mark.skipif(not DEEPSPEED, reason="needs the extra deepspeed")


def zero(test):
    """Mark a test that needs DeepSpeed, which CI has where everything is."""
    return pytest.mark.together(_needs_deepspeed(test))


by_family = pytest.mark.parametrize(
    "names",
    [
        pytest.param(["ddp", "fsdp2"], id="ddp-fsdp2"),
        pytest.param(["zero1", "zero3"], id="zero1-zero3", marks=[_needs_deepspeed, pytest.mark.lane]),
    ],
)

SAMPLES = [
    ([5, 6, 7, 8, 9, 10, 11], [-100, -100, 7, 8, -100, 10, 11]),
    ([3, 60, 2, 59, 1, 58, 0, 57, 33, 21, 20], [3, 60, 2, 59, 1, 58, 0, 57, 33, 21, 20]),
    ([42, 17], [-100, 17]),
]


def strategy_of(ranks, name, *, adapter=False, **options):
    """The strategy `name`; hsdp with shards over two ranks."""
    import forge_dist

    if name == "hsdp":
        options["shard_size"] = 2
    settings = forge_dist.StrategySettings(strategy=name, **options)
    return forge_dist.make_strategy(settings, ranks, device=CPU, adapter=adapter)


def changed(parameters, modifier=None):
    """Something like a training step, the same elements to the same values however they are divided."""
    for parameter in parameters:
        context = nullcontext()
        if hasattr(parameter, "ds_id"):
            import deepspeed

            context = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with torch.no_grad(), context:
            parameter.mul_(0.75).add_(0.015625)


def adapted(model):
    """A LoRA adapter of rank 3 on `model`, with weights that are not zero and follow from a seed."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def ready(strategy, path, *, lora=False, dtype=torch.float32):
    """The model of `path` by `strategy`, changed, and wrapped in training mode: (what is called, the model inside)."""
    model = strategy.load(path, dtype=dtype, attention="sdpa")
    if lora:
        strategy.settle(model)
        model = adapted(model)
    else:
        changed(model.parameters())
    wrapped, _ = strategy.wrap(model, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3))
    return wrapped.train(), model


def files_of(directory):
    """Name → bytes of every file of a directory."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}
