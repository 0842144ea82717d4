"""Claim: on a GPU, a full fine-tune of a 1B model reaches 45 % of the chip's dense bf16 peak, and is as fast as a bare loop.

Models of Llama-3.2-1B's and Qwen3-0.6B's shape with random weights; packed chats of real length spread with labels on the
assistant's tokens; weights and AdamW states in fp32, bf16 autocast; full or LoRA (r 16, all linear layers); one row an
optimizer step, gradients clipped at 1.0. Sides, each a process of its own, in turn step by step: `forge` (forge_accel,
forge_dist, forge_packing, forge_algos as `forge.sft` runs them), `bare` (a plain PyTorch loop with the same attention
function), `trl` (SFTTrainer on the same rows, where it is installed). The ratio is forge's tokens per second over the bare
loop's; `sides` has tokens/s, MFU and peak memory of each. MFU counts causally: the formula is in `_flops.py`. The device is
the one that forge_accel finds; figures of a CPU say nothing about a GPU, and have no MFU.

    python benchmarks/gpu_sft.py --shape llama-3.2-1b
    python benchmarks/gpu_sft.py --shape qwen3-0.6b --adapter lora --trl-attention flash_attention_2
"""

import argparse
import importlib.util
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _chats import MODULES, TOY_MODULES, make_chats, stand_in_encode, tokenize_with_stand_in
from _flops import step_flops
from _lockstep import agree, race
from _models import Described, describe, write_model
from _report import emit, machine, note
from _rows import Rows, write_rows

TOYS = {"llama-3.2-1b": "toy-llama", "qwen3-0.6b": "toy-qwen3"}
SIDES = ("forge", "bare", "trl")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(TOYS), default="llama-3.2-1b")
    parser.add_argument("--adapter", choices=["none", "lora"], default="none")
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens in a row")
    parser.add_argument("--steps", type=int, default=16, help="measured steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them that are not counted")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="forge and bare are needed for the ratio"
    )
    parser.add_argument(
        "--apart", action="store_true", help="one side after the other, where they do not fit into the memory together"
    )
    parser.add_argument("--device", default="auto", help="a name that forge_accel knows")
    parser.add_argument("--attention", default="auto", help="forge's and the bare loop's attention, as forge_accel names it")
    parser.add_argument("--trl-attention", default="sdpa", help="TRL's attention, as transformers names it")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds on a CPU and proves nothing")
    options = parser.parse_args()
    if not {"forge", "bare"} <= set(options.sides):
        parser.error("--sides must hold forge and bare: the ratio is between them")
    return options


def summary(
    done: list[dict[str, Any]], end: dict[str, Any], flops: list[float], peak_flops: float | None, warmup: int
) -> dict[str, Any]:
    """Summarise one side by medians over its measured steps; `mfu` is None where the device's peak is unknown."""
    measured = list(zip(done, flops, strict=True))[warmup:]
    rate = statistics.median(f / figures["seconds"] for figures, f in measured)
    return {
        "tokens_per_second": round(statistics.median(figures["tokens"] / figures["seconds"] for figures, _ in measured), 1),
        "seconds_per_step": round(statistics.median(figures["seconds"] for figures, _ in measured), 4),
        "tflops": round(rate / 1e12, 4),
        "mfu": None if peak_flops is None else round(rate / peak_flops, 4),
        "peak_device_bytes": end["peak_device_bytes"],
        "peak_rss_bytes": end["peak_rss_bytes"],
    }


def lora_weights(model: Path, adapter: str) -> int:
    """Count the trained weights of the adapter, on a model without storage; 0 for a full fine-tune."""
    if adapter == "none":
        return 0
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        peft = get_peft_model(
            causal_lm, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), low_cpu_mem_usage=True
        )
    return sum(p.numel() for p in peft.parameters() if p.requires_grad)


def chip(name: str) -> tuple[dict[str, Any], float | None]:
    """Describe the device by forge_accel, with its dense peak in operations a second where that is known."""
    import torch

    from forge_accel import accelerator

    found = accelerator(name)
    device, dtype = found.device.value, found.dtype("auto").value
    hardware = torch.accelerator.is_available() and device.type != "cpu"
    model = torch.get_device_module(device).get_device_name(device) if hardware else "none: not run on a GPU"
    described = {
        "accelerator": found.name, "device": str(device), "chip": model, "dtype": str(dtype).removeprefix("torch."),
        "attention": found.attention("auto", dtype).value.name, "peak_flops": found.peak_flops(dtype),
    }  # fmt: skip
    return described, described["peak_flops"]


def main() -> None:
    """Measure and print the line."""
    options = arguments()
    shape, tokens, warmup, steps = options.shape, options.tokens, options.warmup, options.steps
    if options.toy:
        shape, tokens, warmup, steps = TOYS[options.shape], 128, 1, 2
    sides = [side for side in options.sides if side != "trl" or importlib.util.find_spec("trl")]
    if missing := sorted(set(options.sides) - set(sides)):
        note(f"{', '.join(missing)} is not installed here and is left out")
    at = machine()
    device, peak_flops = chip(options.device)
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = write_model(shape, folder / "model")
        model: Described = describe(directory, shape)
        adapter_weights = lora_weights(directory, options.adapter)
        encode = stand_in_encode(model.vocabulary)
        chats = make_chats(
            lambda turns: tokenize_with_stand_in(turns, encode),
            kind="both",
            max_length=min(tokens, 4096),
            modules=TOY_MODULES if options.toy else MODULES,
        )
        rows: Rows = write_rows(folder / "rows.npz", chats, tokens, warmup + steps)
        job = {
            "model": str(directory), "vocabulary": model.vocabulary, "adapter": options.adapter,
            "rows": str(folder / "rows.npz"),
            "tokens": tokens, "trl_packing": "rows", "trl_attention": options.trl_attention, "attention": options.attention,
            "learning_rate": 1e-5,
            "device": options.device if options.device != "auto" else device["accelerator"], "dtype": device["dtype"],
        }  # fmt: skip
        figures, ends = {}, {}
        for group in [[side] for side in sides] if options.apart else [sides]:
            some, some_ends = race(job, folder, group, warmup + steps)
            figures |= some
            ends |= some_ends
    first = agree(figures, tolerance=1e-4 if device["dtype"] == "float32" else 1e-2)
    flops = [step_flops(model, rows.lengths(i), rows.labelled(i), lora_weights=adapter_weights) for i in range(warmup + steps)]
    results = {side: summary(done, ends[side], flops, peak_flops, warmup) for side, done in figures.items()}
    emit(
        "gpu_sft",
        "tokens per second of forge's pieces over a bare PyTorch loop with the same attention, bf16 autocast on a GPU",
        results["forge"]["tokens_per_second"] / results["bare"]["tokens_per_second"],
        0.97,
        toy=options.toy,
        at=at,
        device=device,
        mfu=results["forge"]["mfu"],
        mfu_target=0.45,
        sides=results,
        missing_sides=missing,
        first_loss=first,
        sizes={
            "shape": shape, "adapter": options.adapter, "tokens_per_row": tokens, "steps": steps, "warmup": warmup,
            "in_turn": not options.apart,
            "labelled_share": round(sum(map(rows.labelled, range(len(flops)))) / sum(map(rows.tokens, range(len(flops)))), 4),
            "linear_weights": model.linear_weights, "adapter_weights": adapter_weights, "trl_attention": options.trl_attention,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
