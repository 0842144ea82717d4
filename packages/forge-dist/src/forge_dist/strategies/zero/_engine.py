"""DeepSpeed, found, imported without its chatter and without its compiler, and told what we want of it."""

import contextlib
import importlib
import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._errors import StrategyError
from forge_dist._settings import StrategySettings
from forge_dist._third_party_logs import hush_imports

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

# Elements that are communicated in one go; DeepSpeed's own half a billion would be a buffer of 2 GB before the first gradient.
_BUCKET = 50_000_000
# Elements that stay whole between a layer's forward and its backward; DeepSpeed's own number, which a small model never reaches.
_LIVE = 1_000_000_000


def require_deepspeed(name: str) -> None:
    """Look for what strategy `name` needs, without importing it.

    Raises:
        StrategyError: it is not installed; names the command that installs it.
    """
    # transformers reads a model in ZeRO-3's way only where accelerate is there too.
    needed = ("deepspeed", "accelerate") if name == "zero3" else ("deepspeed",)
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise StrategyError(
            f"strategy={name} needs {' and '.join(missing)}: `pip install 'forge-dist[deepspeed]'`, or use strategy=fsdp2"
        )


def prepare_import(ranks: "Ranks", device: torch.device) -> None:
    """Say what DeepSpeed takes from the environment at its import, and keep it from printing; peft and accelerate import it too."""
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    hush_imports()


def import_deepspeed() -> Any:
    """The module `deepspeed`, kept from compiling."""
    # Torch's new names for collectives that DeepSpeed calls by the old ones.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    deepspeed = importlib.import_module("deepspeed")
    # Otherwise the first run on a machine's CPU compiles a kernel for inference for a minute or two (or fails without a compiler), to
    # sum small tensors through shared memory, which training never does. Nothing else reads this table.
    deepspeed.ops.__compatible_ops__ = {}
    _import_without_compiler("deepspeed.runtime.zero.muon.muon_optimizer")
    if not torch.distributed.is_initialized():
        # A world of one has no process group of its own, and DeepSpeed works in none.
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    return deepspeed


def _import_without_compiler(module: str) -> None:
    """DeepSpeed imports its Muon to see that our optimizer is not that one; decorators there load torch's whole compiler, for seconds."""

    def as_it_is(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else as_it_is

    compile_ = torch.compile
    torch.compile = as_it_is  # pyrefly: ignore[bad-assignment]  decorators are all that calls it in between
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    finally:
        torch.compile = compile_


def engine_config(
    settings: StrategySettings, stage: int, *, elements: int = _LIVE, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """DeepSpeed's configuration: the optimizer ours, steps and clipping counted by us.

    `elements`: of the model, so that buffers stay a small part of it. `dtype`: of the weights that are read.
    """
    bucket = max(1_000_000, min(_BUCKET, elements // 8))
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # It would replace torch.nn.functional.linear for the whole process.
        "memory_efficient_linear": False,
    }
    if stage == 3:
        live = min(_LIVE, elements // 4)
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    if settings.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
    }
