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

from forge_dist._errors import ExportError
from forge_dist._third_party_logs import quiet
from forge_dist.adapters._adapter import active_adapter, base_of, base_path, is_peft, read_adapter, unwrapped
from forge_dist.exporting._layout import layout_of
from forge_dist.exporting._plain import check_without, left
from forge_dist.exporting._plain_from_plain import Plain, made_plain, plain_tensors
from forge_dist.loading._load import check_report
from forge_dist.loading._model_path import Task
from forge_dist.loading._quantization import Quantized, quantization_of, settle_quantized, without_codes
from forge_dist.loading._task import auto_class, is_reward, reward_config, settle_head
from forge_dist.strategies._gather import whole_tensors
from forge_dist.strategies._virtual_tokens import thrown_away
from forge_dist.verifying._loss import Sample, Score, as_for_inference, score, to_compare
from forge_dist.verifying._result import ExportCheck
from forge_dist.verifying._tensors import Files, adapter_tensors, prove_files, prove_model, prove_reloaded

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from forge_dist.strategies._strategy import Strategy

EXACT = 1e-5
"""Same weights, same kernels, float32: the two losses are in truth equal; this leaves room for sums in another order."""

PADDED = 1e-4
"""For rewards in a padded batch, float32: attention has a mask then, and so other kernels, whose rounding every layer passes on."""

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
    without: Sequence[str] = (),
    plain: Plain | None = None,
) -> ExportCheck:
    """Read `directory` back and compare it with `model`, from which it was exported; return what was found.

    1. Every tensor in the files equals the one in memory (of a run that keeps changes beside its weights: what `plain` makes of it), cast to the stored type, bit for bit; none is missing or too many.
    2. The directory loads through plain transformers (an adapter through plain PEFT, on its base model loaded afresh) on the
       same device, and every tensor of the result equals the one in memory.
    3. Both give the same loss on `samples`, pairs (input_ids [S], labels [S]; -100 is not learned), one unpadded sample at a time,
       with plain attention, in eval mode, without autocast, in the arithmetic of the model in memory. Where the export rounded the
       weights, what was reloaded must also give that loss with the unrounded ones. A reward model is compared by its rewards, at each
       sample's last token: what was reloaded must give them for one unpadded row at a time, and for one batch padded on the right. An
       adapter's base model is loaded with `num_labels=1` and the `pad_token_id` that `load_model` gave it.

    `without` and `plain` are what `export_model` was told. A second copy of the model is held meanwhile. Modes, attention and random state of `model` are afterwards as before.

    With the `strategy` that the model was loaded by, all ranks call this together, with what `wrap` returned and with the same samples.
    Tensors are put together one at a time, on rank 0; the second copy is loaded as this strategy loads, so it is divided where the model
    is; every rank takes part in the forwards, and the losses are compared on each of them. All ranks return rank 0's findings.

    Raises:
        ExportError: the first tensor that differs, or the two losses; a loss that is not finite; no sample with a learned token (of a reward
            model: none that ends with another token than the padding one); an adapter that does not name its base model. With a strategy it is raised on all ranks.
    """
    path = Path(os.path.abspath(directory))
    found = to_compare(model, samples)
    if not found:
        wanted = (
            "ends with another token than the padding one" if is_reward(base_of(unwrapped(model))) else "has a learned token"
        )
        raise ExportError(f"{path} cannot be compared: none of the {len(samples)} samples {wanted}")
    samples = found
    check_without(unwrapped(model), without, path)
    if strategy is not None and strategy.name != "single":
        from forge_dist.verifying._check_divided import check_divided

        return check_divided(model, path, samples, strategy=strategy, without=without, plain=plain)
    model = unwrapped(model)
    base = base_of(model)
    plain = None if is_peft(model) else plain
    without = (*without, *thrown_away(model))
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
                below = _reload_model(base_path(path), base, below_adapter=True)
                reloaded = read_adapter(below, path, name)
            else:
                expected = (layout := layout_of(base, None, without)).files
                with Files(path, "model") as files:
                    files.prove_names(expected)
                    whole = whole_tensors(base, device, is_first=True)
                    prove_model(files, base, layout, plain_tensors(base, whole, plain, without))
                types = files.floats
                reloaded = below = _reload_model(str(path), base)
        except (ExportError, torch.OutOfMemoryError):
            raise
        except READING as error:
            raise ExportError(f"{path} cannot be read back: {error}") from error
        rounded = prove_reloaded(model, reloaded, types, path, without, plain)
        # The reloaded model decides: sdpa wherever the architecture has it, as for whoever will load the directory.
        with as_for_inference(model, base, str(below.config._attn_implementation)):
            ours = score(model, samples, device)
        theirs = same_weights = score(reloaded, samples, device, reloaded=True)
        if rounded:
            # What was exported, computing with the very weights of the model in memory: its configuration is right, or it shows.
            # Codes are what they were, and their layers would not know them any more.
            state = without_codes(model, left(model.state_dict(), without))
            whole = {name: made_plain(plain, name, tensor) for name, tensor in state.items()}
            reloaded.load_state_dict(whole, assign=True, strict=quantization_of(base) is None)
            same_weights = score(reloaded, samples, device, reloaded=True)
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
        what = "the mean reward" if ours.rewards else "the loss"
        raise ExportError(
            f"{path}: {what} of the model in memory is {ours.mean}, so the training diverged; use an earlier export"
        )
    tolerance = ROUNDED if rounded else arithmetic
    compared = [("", theirs.values, tolerance), (" even with the weights in memory", same_weights.values, arithmetic)]
    if theirs.padded:
        compared.append((" in a padded batch", same_weights.padded, max(arithmetic, PADDED)))
    unit = "as the reward of a sample" if ours.rewards else "nats per token"
    for what, values, allowed in compared:
        expected, found = max(zip(ours.values, values, strict=True), key=lambda pair: _ranked(*pair))
        if not difference(expected, found) <= allowed:
            raise ExportError(
                f"{path}{what} does not compute what the model in memory does: {found:.8g} {unit} instead of "
                f"{expected:.8g} (a difference of {difference(expected, found):.3g}, allowed {allowed:g})"
            )
    return ExportCheck(
        in_memory=ours.mean,
        reloaded=theirs.mean,
        difference=max(map(difference, ours.values, theirs.values)),
        tolerance=tolerance,
        loss_tokens=ours.count,
        tensors=tensors,
    )


def _ranked(expected: float, found: float) -> float:
    apart = difference(expected, found)
    return apart if math.isfinite(apart) else math.inf


def difference(expected: float, found: float) -> float:
    """How far `found` is from `expected`, both in nats per token (or rewards): relative, and absolute where `expected` is below 1 nat.

    A model that has learned its samples by heart has a loss near 0, of which rounding errors in the logits are any multiple.

    >>> difference(4.0, 5.0), difference(0.5, 0.25)
    (0.25, 0.25)
    """
    return abs(found - expected) / max(abs(expected), 1.0)


def _reload_model(path: str, base: "PreTrainedModel", *, below_adapter: bool = False) -> "PreTrainedModel":
    """The model of `path` by plain transformers, on the device and in the arithmetic of `base`, quantized as that is.

    In bfloat16 on a CPU the comparison would take ten times as long; values that were stored as bfloat16 are exact in float32.
    """
    task: Task = "reward" if is_reward(base) else "causal"
    # The base of a reward model's adapter may be a causal model, whose directory knows neither of the one label nor of padding.
    config = reward_config(path) if task == "reward" and below_adapter else None
    quantization = quantization_of(base)
    quantized = {} if quantization is None else Quantized(quantization, base.device).arguments(path, task)
    model, report = auto_class(task).from_pretrained(
        path,
        dtype=base.dtype,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **({} if config is None else {"config": config}),
        **quantized,
    )
    if config is not None:
        settle_head(model, config, report, path, lambda drawn: drawn)
    check_report(report, path)
    settle_quantized(model)
    return model.to(base.device)
