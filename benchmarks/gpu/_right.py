"""Correctness of kernels: attention, isolation, compiled blocks, fused layers, rounding, waits for the device."""

import math
from collections import Counter
from typing import Any

from _here import Here, check, packed, relative

_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal")
"""Operators whose result the host reads; a copy to the host is one too."""


@check("speed")
def ceilings(here: Here) -> tuple[None, dict[str, Any]]:
    """Report the device's own rates of bf16 products and copies, and every choice with its reason."""
    from forge_accel import DeviceSettings, describe

    n = 256 if here.toy else 8192
    a, b = (here.torch.randn(n, n, device=here.device, dtype=here.dtype) for _ in range(2))
    x = here.torch.empty(1 << (20 if here.toy else 30), device=here.device, dtype=here.torch.int16)
    y = here.torch.empty_like(x)
    choices = {row.what: row.reason for row in describe(here.machine, DeviceSettings())}
    product, copy = _seconds(here, lambda: a @ b), _seconds(here, lambda: y.copy_(x))
    return None, {"tflops": round(2 * n**3 / product / 1e12, 1), "copy_tb_s": round(2 * x.nbytes / copy / 1e12, 3), **choices}


@check("right")
def kernel(here: Here) -> tuple[bool, dict[str, Any]]:
    """Compare the device's document attention in bf16 with float32, sample by sample: heads, sizes, windows; gradients too."""
    from forge_accel import document_attention

    fast = here.machine.attention("auto", here.dtype).value.function
    lengths, worst = [5, 33, 17] if here.toy else [1, 2, 129, 700, 64, 1000], {}
    ends = here.torch.tensor([0, *lengths], device=here.device).cumsum(0).to(here.torch.int32)
    for heads, groups, size in ((4, 4, 64), (8, 2, 64), (32, 8, 128), (6, 2, 96), (2, 1, 256)):
        for window in (None, 16):
            here.torch.manual_seed(1)
            drawn = [here.torch.randn(1, n, sum(lengths), size, device=here.device) for n in (heads, groups, groups)]
            results = []
            for function, dtype in ((fast, here.dtype), (document_attention, here.torch.float32)):
                states = [state.to(here.dtype).to(dtype).requires_grad_() for state in drawn]
                more = {"cu_seq_lens_q": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
                out, _ = function(None, *states, sliding_window=window, **more)
                (out.float() * here.torch.linspace(-1, 1, out.numel(), device=here.device).view(out.shape)).sum().backward()
                results.append([out.detach(), *(state.grad for state in states)])
            name = f"{heads}/{groups}x{size}{'' if window is None else f' window {window}'}"
            worst[name] = max(relative(ours, theirs) for ours, theirs in zip(*results, strict=True))
    return all(math.isfinite(error) and error < 2e-2 for error in worst.values()), {"relative_errors": worst}


@check("right")
def isolation(here: Here) -> tuple[bool, dict[str, Any]]:
    """Change one document of a row: no bit of another's hidden states changes, and no gradient leaks into its tokens."""
    torch, model = here.torch, here.model("small", dtype=here.torch.float32).eval()
    first, second = (20, 30) if here.toy else (300, 500)
    vocabulary = model.config.vocab_size
    ids = torch.arange(first + second, device=here.device) % (vocabulary // 2)
    ids[:first] += vocabulary // 2  # no token in common
    ends = torch.tensor([0, first, first + second], dtype=torch.int32, device=here.device)
    positions = torch.cat([torch.arange(first), torch.arange(second)]).to(here.device)[None]
    more = {"position_ids": positions, "use_cache": False, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    more |= {"max_length_q": second, "max_length_k": second}
    other = ids.clone()
    other[:first] = (other[:first] - vocabulary // 2 + 17) % (vocabulary // 2) + vocabulary // 2
    with torch.no_grad(), here.autocast():
        a, b = (model.model(input_ids=row[None], **more).last_hidden_state[0, first:] for row in (ids, other))
    with here.autocast():
        hidden = model.model(input_ids=ids[None], **more).last_hidden_state[0, first:]
    hidden.float().square().sum().backward()
    leak = float(model.model.embed_tokens.weight.grad[ids[:first].unique()].abs().max())
    return torch.equal(a, b) and leak == 0.0, {"largest_difference": float((a - b).abs().max()), "leaked_gradient": leak}


@check("right")
def compiled(here: Here) -> tuple[bool, dict[str, Any]]:
    """Train six row sizes with compiled blocks: one kind of block, no fallback, the losses of the plain blocks."""
    from forge_accel import CompiledBlocks
    from forge_algos import repeated_blocks

    rows = [[packed(here.rows("small", here.lengths(2048 + 512 * k, seed=k), seed=k))] for k in range(6)]
    losses, notes, problem = [], [], None
    for compiling in (False, True):
        model = here.model("small", dtype=here.torch.float32)
        if compiling:
            backend = "aot_eager" if here.toy else "inductor"
            blocks = CompiledBlocks(repeated_blocks(model), backend=backend, note=notes.append)
        losses.append([out.loss for out in here.train(model, rows)])
        problem = blocks.problem if compiling else None
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return problem is None and len(notes) == 1 and apart < 2e-2, {"apart": apart, "notes": notes, "problem": problem}


@check("right")
def liger(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Replace layers by Liger's kernels: each is tried, and the loss of a step stays."""
    from forge_accel import AccelError, use_liger

    try:
        here.machine.kernels("liger")
    except AccelError as error:
        return None, {"skipped": str(error)}
    rows, losses = [[packed(here.rows("small", here.lengths(4096)))]] * 3, []
    for fused in (False, True):
        model = here.model("small", dtype=here.torch.float32)
        found = use_liger(model, dtype=here.dtype, device=here.device) if fused else []
        losses.append([out.loss for out in here.train(model, rows)])
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    replaced = {each.kind: [each.number, each.why] for each in found}
    return apart < 2e-2 and all(number for number, _ in replaced.values()), {"apart": apart, "replaced": replaced}


@check("right")
def adamw_8bit(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Compare the kernel of AdamW with moments in 8 bits with AdamW, and its time with that of bitsandbytes' kernel."""
    from unittest.mock import patch

    from forge_algos import asked_kernels
    from forge_algos.optimizers import _adamw_8bit

    if not here.gpu:
        return None, {"skipped": "the kernel is Triton's, for CUDA"}
    facts: dict[str, Any] = {"agrees": _adamw_8bit._has_kernel(here.device)}
    facts["kernels"] = [str(each) for each in asked_kernels()]
    for name, dtype in (("float32", here.torch.float32), ("bfloat16", here.dtype)):
        weight = here.torch.nn.Parameter(here.torch.randn(14_336, 4096, device=here.device).to(dtype))
        weight.grad = here.torch.randn_like(weight) * 0.01
        for side, used in (("ours", True), ("bitsandbytes", False)):
            with patch.object(_adamw_8bit, "_has_kernel", lambda _, used=used: used):
                optimizer = _adamw_8bit.AdamW8bit([{"params": [weight]}], lr=1e-5, betas=(0.9, 0.95), eps=1e-8)
                facts[f"{name}, {side}, ms"] = round(1e3 * _seconds(here, optimizer.step), 3)
    return facts["agrees"], facts


@check("right")
def rounding(here: Here) -> tuple[bool, dict[str, Any]]:
    """Compare the device's rounding to GGUF's types with the CPU's by its bits: zeros, subnormals, ties and large scales."""
    from forge_algos import fake_quantize

    scales = here.torch.tensor([0.0, 1e-45, 1e-40, 1e-30, 6e-8, 1e-4, 0.02, 1.0, 3e4])[:, None]
    numbers = here.torch.randn(len(scales), 320 if here.toy else 1 << 20, generator=here.torch.Generator().manual_seed(0))
    numbers[:, :160] = numbers[:, :160].round()
    weight, same = numbers * scales, {}
    for kind in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        ours, theirs = fake_quantize(weight.to(here.device), kind).cpu(), fake_quantize(weight, kind)
        same[kind] = bool((ours.view(here.torch.int32) == theirs.view(here.torch.int32)).all())
    return all(same.values()), {"same_bits": same}


@check("right")
def waits(here: Here) -> tuple[bool, dict[str, Any]]:
    """Count how often the host reads a number of the device in a step of three micro-batches: once a step is the claim."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            to_host = isinstance(out, here.torch.Tensor) and out.device.type == "cpu" and str(func).startswith("aten._to_copy")
            if str(func).startswith(_READS) or (to_host and args[0].device.type != "cpu"):
                counted[str(func)] += 1
            return out

    model = here.model("small", dtype=here.torch.float32)
    steps = [[packed(here.rows("small", here.lengths(4096, seed=j), seed=j)) for j in range(3)] for _ in range(2)]
    loop = here.train(model, steps)
    next(loop)
    with Count():
        next(loop)
    loop.close()
    # On a CPU the samples of a row are split by their ends, and a kernel of a GPU is handed them.
    return not here.gpu or sum(counted.values()) <= 2, {"waits": dict(counted)}


def _seconds(here: Here, function: Any, repeats: int = 10) -> float:
    """Return the mean time of a call, after three that are not counted."""
    import time

    for _ in range(3):
        function()
    here.machine.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    here.machine.synchronize()
    return (time.perf_counter() - started) / repeats
