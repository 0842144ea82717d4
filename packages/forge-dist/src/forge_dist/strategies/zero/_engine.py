"""Import DeepSpeed without its log messages and its compiler, and configure it."""

import contextlib
import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._settings import StrategySettings
from forge_dist._third_party_logs import quiet_imports

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

# Elements that are communicated at once; DeepSpeed's own half a billion would be a buffer of 2 GB before the first gradient.
_BUCKET = 50_000_000
# Elements that stay whole between a layer's forward and its backward; DeepSpeed's own number, which a small model never
# reaches.
_LIVE = 1_000_000_000
# Elements of a weight that stays whole all the time; DeepSpeed's own number, below which lie all weights of a small model.
_WHOLE = 100_000


def prepare_import(ranks: "Ranks", device: torch.device) -> None:
    """Set the variables that DeepSpeed reads at its import, and silence it.

    peft and accelerate import it too.
    """
    if "LOCAL_RANK" not in os.environ:
        # One process that no launcher started. The next run of the same process would take it for half a launcher's
        # environment.
        os.environ["LOCAL_RANK"] = str(ranks.local_rank)
        ranks.at_exit.callback(os.environ.pop, "LOCAL_RANK", None)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    quiet_imports()


def import_deepspeed() -> Any:
    """Import `deepspeed` without compiling its kernels."""
    # DeepSpeed calls torch's collectives by older names.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    deepspeed = importlib.import_module("deepspeed")
    # Otherwise the first run on a machine's CPU compiles a kernel for inference for a minute or two (or fails without a
    # compiler), which sums small tensors through shared memory; training never does. Nothing else reads this table.
    deepspeed.ops.__compatible_ops__ = {}
    _import_without_compiler("deepspeed.runtime.zero.muon.muon_optimizer")
    if not torch.distributed.is_initialized():
        # One rank has no process group, which DeepSpeed needs.
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    return deepspeed


def _import_without_compiler(module: str) -> None:
    """Import `module` with `torch.compile` replaced.

    DeepSpeed imports its Muon to check that our optimizer is not that one; decorators there would load torch's whole compiler,
    for seconds.
    """

    def unchanged(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else unchanged

    compile_ = torch.compile
    torch.compile = unchanged  # pyrefly: ignore[bad-assignment]  decorators are all that calls it in between
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    finally:
        torch.compile = compile_


def engine_config(
    settings: StrategySettings, stage: int, *, elements: int = _LIVE, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return DeepSpeed's configuration; it manages neither optimizer, accumulation nor clipping.

    Args:
        settings: the strategy's.
        stage: 1, 2 or 3.
        elements: number of elements of the model, so that buffers stay a small part of it.
        dtype: of the weights that are read.
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
        zero["stage3_param_persistence_threshold"] = min(_WHOLE, elements // 1000)
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
