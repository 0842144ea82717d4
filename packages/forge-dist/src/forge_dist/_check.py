"""An export → proof that plain transformers (or plain PEFT) reads back the model in memory, or an error that says where not.

Three proofs, from the files up: the stored bits, the reloaded tensors, and the loss on a few samples. `_check_divided` does it for a model
that is divided over ranks.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from forge_dist._adapter import active_adapter, base_of, base_path, is_peft, read_adapter, unwrapped
from forge_dist._errors import ExportError
from forge_dist._export_check import ExportCheck
from forge_dist._load import check_report
from forge_dist._proof import adapter_tensors, model_tensors, prove_files, prove_reloaded
from forge_dist._quiet import quiet
from forge_dist._score import Sample, Score, as_for_inference, has_learned_token, score

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from forge_dist._strategy import Strategy

EXACT = 1e-5
"""Same weights, same kernels, float32: the two losses are in truth equal; this leaves room for sums in another order."""

HALF = 2e-2
"""The same for a model that is held, and so compared, in 16 bits."""

ROUNDED = 1e-1
"""For weights that the export rounded to 16 bits. Measured on a 135M-parameter model over 70 tokens: 4e-3, and more over fewer tokens. The bound
has little to catch (an overflow of float16): the bits are proved before, and the configuration with the unrounded weights to EXACT."""

READING = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, ImportError, SafetensorError)


def check_export(
    model: "PreTrainedModel | PeftModel | torch.nn.Module",
    directory: str | os.PathLike[str],
    samples: Sequence[Sample],
    *,
    strategy: "Strategy | None" = None,
) -> ExportCheck:
    """Read `directory` back and compare it with `model`, from which it was exported; return what was found.

    1. Every tensor in the files equals the one in memory, cast to the stored type, bit for bit; none is missing or too many.
    2. The directory loads through plain transformers (an adapter through plain PEFT, on its base model loaded afresh) on the
       same device, and every tensor of the result equals the one in memory.
    3. Both give the same loss on `samples`, pairs (input_ids [S], labels [S]; -100 is not learned), one unpadded sample at a time,
       with plain attention, in eval mode, without autocast, in the arithmetic of the model in memory. Where the export rounded the
       weights, what was reloaded must also give that loss with the unrounded ones.

    A second copy of the model is held meanwhile. Modes, attention and random state of `model` are afterwards as before.

    With the `strategy` that the model was loaded by, all ranks call this together, with what `wrap` returned and with the same samples.
    Tensors are put together one at a time, on rank 0; the second copy is loaded as this strategy loads, so it is divided where the model
    is; every rank takes part in the forwards, and the losses are compared on each of them. All ranks return rank 0's findings.

    Raises:
        ExportError: the first tensor that differs, or the two losses; a loss that is not finite; no sample with a learned token; an adapter
            that does not name its base model. With a strategy it is raised on all ranks.
    """
    path = Path(os.path.abspath(directory))
    if not any(has_learned_token(labels) for _, labels in samples):
        raise ExportError(f"{path} cannot be compared: none of the {len(samples)} samples has a learned token")
    if strategy is not None and strategy.name != "single":
        from forge_dist._check_divided import check_divided

        return check_divided(model, path, samples, strategy=strategy)
    model = unwrapped(model)
    base = base_of(model)
    device = base.device
    # Making an adapter afresh draws random numbers; the run that goes on must not see that.
    devices = [] if device.type == "cpu" else [device]
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng(devices=devices, **kind), quiet():
        try:
            if is_peft(model):
                name = active_adapter(model)
                expected = adapter_tensors(model, name)
                types = prove_files(expected, path, "adapter_model")
                plain = _reload_model(base_path(path), base)
                reloaded = read_adapter(plain, path, name)
            else:
                expected = model_tensors(base)
                types = prove_files(expected, path, "model")
                reloaded = plain = _reload_model(str(path), base)
        except (ExportError, torch.OutOfMemoryError):
            raise
        except READING as error:
            raise ExportError(f"{path} cannot be read back: {error}") from error
        rounded = prove_reloaded(model, reloaded, types, path)
        # The reloaded model decides: sdpa wherever the architecture has it, as for whoever will load the directory.
        with as_for_inference(model, base, str(plain.config._attn_implementation)):
            ours = score(model, samples, device)
        theirs = same_weights = score(reloaded, samples, device)
        if rounded:
            # What was exported, computing with the very weights of the model in memory: its configuration is right, or it shows.
            reloaded.load_state_dict(model.state_dict(), assign=True)
            same_weights = score(reloaded, samples, device)
    in_float32 = all(tensor.dtype not in (torch.float16, torch.bfloat16) for tensor in model.state_dict().values())
    return judge(
        path, ours, theirs, same_weights, arithmetic=EXACT if in_float32 else HALF, rounded=rounded, tensors=len(expected)
    )


def judge(
    path: Path, ours: Score, theirs: Score, same_weights: Score, *, arithmetic: float, rounded: bool, tensors: int
) -> ExportCheck:
    """The findings, if the losses of the model in memory, of its export, and of its export with the weights in memory are close.

    Raises:
        ExportError: the first one is not finite, or another differs from it by more than `arithmetic` (of a `rounded` export: ROUNDED).
    """
    if not math.isfinite(ours.mean):
        raise ExportError(
            f"{path}: the loss of the model in memory is {ours.mean}, so the training diverged; use an earlier export"
        )
    tolerance = ROUNDED if rounded else arithmetic
    for what, found, allowed in (("", theirs, tolerance), (" even with the weights in memory", same_weights, arithmetic)):
        if not difference(ours.mean, found.mean) <= allowed:
            raise ExportError(
                f"{path}{what} does not compute what the model in memory does: {found.mean:.8g} nats per token instead of "
                f"{ours.mean:.8g} (a difference of {difference(ours.mean, found.mean):.3g}, allowed {allowed:g})"
            )
    return ExportCheck(
        in_memory=ours.mean,
        reloaded=theirs.mean,
        difference=difference(ours.mean, theirs.mean),
        tolerance=tolerance,
        loss_tokens=ours.loss_tokens,
        tensors=tensors,
    )


def difference(expected: float, found: float) -> float:
    """How far `found` is from `expected`, both in nats per token: relative, and absolute where `expected` is below 1 nat.

    A model that has learned its samples by heart has a loss near 0, of which rounding errors in the logits are any multiple.

    >>> difference(4.0, 5.0), difference(0.5, 0.25)
    (0.25, 0.25)
    """
    return abs(found - expected) / max(abs(expected), 1.0)


def _reload_model(path: str, base: "PreTrainedModel") -> "PreTrainedModel":
    """The model of `path` by plain transformers, on the device and in the arithmetic of `base`.

    In bfloat16 on a CPU the comparison would take ten times as long; values that were stored as bfloat16 are exact in float32.
    """
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=base.dtype,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_report(report, path)
    return model.to(base.device)
