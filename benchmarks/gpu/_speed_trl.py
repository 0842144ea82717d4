"""Speed of TRL's SFTTrainer on the same machine: rows of one length, in which it has nothing to pad; plain, and with Liger."""

import inspect
import statistics
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from _here import Here, check
from _speed import _flops


def trl_side(here: Here, shape: str, tokens: int, *, lora: bool, liger: bool) -> tuple[None, dict[str, Any]]:
    """Measure TRL's trainer: tokens a second, MFU and peak memory."""
    missing = [name for name in ("trl", "datasets", *(["liger_kernel"] if liger else [])) if find_spec(name) is None]
    if liger and not here.gpu:
        missing.append("a GPU")
    if missing:
        return None, {"skipped": f"not here: {', '.join(missing)}"}
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    length, tokens, steps = (32, 128, 3) if here.toy else (2048, tokens, 9)
    lines = tokens // length
    rows = [row for k in range(steps) for row in here.rows(shape, [length] * lines, seed=k)]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            here.machine.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            here.machine.synchronize()
            times.append(time.perf_counter() - self.began)

    peft = None
    if lora:
        from peft import LoraConfig

        peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    model = here.model(shape, dtype=here.dtype if lora else here.torch.float32, attention="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": lines, "learning_rate": 1e-5,
            "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "weight_decay": 0.0, "max_grad_norm": 1.0,
            "bf16": True, "use_cpu": not here.gpu, "save_strategy": "no", "logging_strategy": "no", "report_to": [],
            "disable_tqdm": True, "packing": False, "max_length": None, "use_liger_kernel": liger,
            "activation_checkpointing": False, "gradient_checkpointing": False,
        }  # fmt: skip
        known = inspect.signature(SFTConfig).parameters
        table = {name: [getattr(row, name).tolist() for row in rows] for name in ("input_ids", "labels")}
        here.machine.reset_peak_memory()
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**{name: value for name, value in given.items() if name in known}),
            train_dataset=Dataset.from_dict(table),
            processing_class=tokenizer,
            peft_config=peft,
            callbacks=[Clock()],
        )
        trainer.train()
    seconds, peak = statistics.median(times[1 if here.toy else 3 :]), here.machine.peak_flops(here.dtype)
    labelled = lines * int((rows[0].labels[1:] != -100).sum())
    flops = _flops(here, shape, [length] * lines, labelled, trainer.model if lora else None)
    mfu = None if peak is None or here.toy else round(flops / seconds / peak, 4)
    rate = {"tokens_per_second": round(tokens / seconds, 1), "seconds_per_step": round(seconds, 4), "mfu": mfu}
    return None, {
        "side": {"trl": True, "lora": lora, "kernels": "liger" if liger else None},
        "shape": shape,
        **rate,
        **here.peaks(),
    }


@check("speed")
def trl_full_1b(here: Here) -> tuple[None, dict[str, Any]]:
    """Measure TRL's full fine-tune of a 1B model."""
    return trl_side(here, "1b", 16_384, lora=False, liger=False)


@check("speed")
def trl_full_1b_liger(here: Here) -> tuple[None, dict[str, Any]]:
    """Measure TRL's full fine-tune of a 1B model with Liger's kernels."""
    return trl_side(here, "1b", 16_384, lora=False, liger=True)


@check("speed")
def trl_lora_8b(here: Here) -> tuple[None, dict[str, Any]]:
    """Measure TRL's LoRA on an 8B model."""
    return trl_side(here, "8b", 8_192, lora=True, liger=False)


@check("speed")
def trl_lora_8b_liger(here: Here) -> tuple[None, dict[str, Any]]:
    """Measure TRL's LoRA on an 8B model with Liger's kernels."""
    return trl_side(here, "8b", 8_192, lora=True, liger=True)
