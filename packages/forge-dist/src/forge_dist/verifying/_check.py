"""Check an export: plain transformers (or plain PEFT) must read back the model in memory.

Three proofs, from the files up: the stored bits, the reloaded tensors, and the loss on a few samples. A model that no strategy
loaded is checked as one process's.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from safetensors import SafetensorError

from forge_dist._counted import counted
from forge_dist._errors import ExportError
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.adapters._adapter import AttachAdapter
from forge_dist.exporting._adapter_state import adapter_tensors
from forge_dist.exporting._layout import WholeTensors, first_names, layout_of
from forge_dist.exporting._plain import Plain, check_without, plain_tensors, without_added
from forge_dist.exporting._shares import by_tensor, destinations, next_rank, rank_of_files
from forge_dist.loading._modalities import other_modalities
from forge_dist.loading._task import is_sequence_classifier
from forge_dist.loading._unwrap import base_of, is_peft, unwrapped
from forge_dist.ranks._errors_on_all_ranks import errors_on_all_ranks, exhausted
from forge_dist.strategies._strategy import Wanted
from forge_dist.strategies._torch import one_process
from forge_dist.strategies._virtual_tokens import unsaved_modules
from forge_dist.strategies._wrappers import resharded
from forge_dist.verifying._judge import EXACT, HALF, judge
from forge_dist.verifying._loss import Sample, Score, check_samples, comparable_samples, inference_mode, score
from forge_dist.verifying._reload import copy_weights, fill_weights, reload_export
from forge_dist.verifying._result import ExportCheck
from forge_dist.verifying._streamed import streamed
from forge_dist.verifying._tensors import Files, prove_model, prove_reloaded_names, prove_reloaded_tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from forge_dist.strategies._strategy import Strategy

READING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, ImportError, SafetensorError)
"""What reading an export may raise; it becomes an ExportError."""


def check_export(
    model: "PreTrainedModel | PeftModel | torch.nn.Module",
    directory: str | os.PathLike[str],
    samples: Sequence[Sample],
    *,
    strategy: "Strategy | None" = None,
    without: Sequence[str] = (),
    plain: Plain | None = None,
    attach: AttachAdapter | None = None,
) -> ExportCheck:
    """Read `directory` back and compare it with `model`, from which it was exported.

    1. Every tensor in the files equals the one in memory (of a run that keeps changes beside its weights: `plain` of it), cast
    to the
       stored dtype, bit for bit; none is missing or unexpected.
    2. The directory loads through transformers (an adapter through PEFT, on its base model loaded again) on the same device,
    and every
       tensor of the result equals the one in memory.
    3. Both give the same loss on `samples`, pairs (input_ids [S], labels [S]; -100 is not learned), one unpadded sample at a
    time, with
       plain attention, in eval mode, without autocast, in the arithmetic of the model in memory. Where the export rounded the
       weights, the reloaded model must also give that loss with the unrounded ones. A reward model is compared by its rewards,
       at each sample's last token: the reloaded model must give them for one unpadded row at a time, and for one batch padded
       on the right. An adapter's base model is loaded with `num_labels=1` and the `pad_token_id` that `load_model` gave it.

    `without` and `plain` are those of `export_model`. Where the base is divided and PEFT cannot read an adapter of this kind
    onto shards, `attach` does it: a function of base, folder and adapter name, which returns the PeftModel. A second copy of
    the model is held meanwhile: on the host, if the model is on another device. Modes, attention and random state of `model`
    are afterwards as before.

    With the `strategy` that the model was loaded by, all ranks call this together, with what `wrap` returned and with the same
    samples. Tensors are gathered one at a time, each on a rank that did not write it and compares it. The second copy is loaded
    as this strategy loads, so it is divided where the model is; every rank takes part in the forwards, and the losses
    are compared on each of them. All ranks return rank 0's result.

    Raises:
        ExportError: the first tensor that differs, or the two losses; a loss that is not finite; a sample that is no pair, or
            has ids that the model does not know; no sample with a learned token (of a reward model: none that ends with another
            token than the padding one); an adapter that does not name its base model. It is raised on all ranks.
    """
    path = Path(os.path.abspath(directory))
    inner = unwrapped(model)
    base = base_of(inner)
    check_samples(model, samples)
    usable = comparable_samples(model, samples)
    if not usable:
        wanted = "ends with another token than the padding one" if is_sequence_classifier(base) else "has a learned token"
        raise ExportError(f"{path} cannot be compared: none of {counted(len(samples), 'samples')} {wanted}")
    check_without(inner, without, path)
    strategy = one_process(base.device) if strategy is None else strategy
    ranks, device = strategy.ranks, strategy.device
    plain = None if is_peft(inner) else plain
    without = (*without, *unsaved_modules(inner))

    def whole(names: Wanted | None = None) -> WholeTensors:
        return plain_tensors(inner, strategy.whole(model, names), plain, without)

    cannot = f"{path} cannot be read back"
    devices = [] if device.type == "cpu" else [device]
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    # Attaching an adapter draws random numbers, which the run must not notice.
    with torch.random.fork_rng(devices=devices, **kind), quiet_transformers():
        tensors, dtypes = _prove_files(inner, model, whole, path, strategy, without)
        reloaded = reload_export(inner, path, strategy, READING_ERRORS, cannot, attach)
        rounded = _prove_reloaded(inner, whole, reloaded, dtypes, path, strategy, without)
        # The reloaded model's attention, as whoever loads the directory gets: sdpa wherever the language part has it (Gemma 2
        # does not).
        with inference_mode(model, base, str(base_of(reloaded).config.get_text_config()._attn_implementation)):
            ours = _score(model, usable, device)
        strategy.release(model)
        reloaded.eval()
        with strategy.computing(reloaded):
            theirs = same_weights = _score_there(reloaded, usable, strategy)
            if rounded:
                # The export's configuration with the very weights in memory: a wrong configuration shows here.
                with errors_on_all_ranks(ranks, READING_ERRORS, cannot):
                    copy_weights(inner, reloaded) if plain is None else fill_weights(reloaded, whole(), strategy)
                same_weights = _score_there(reloaded, usable, strategy)
    arithmetic = HALF if ours.in_16_bits or _holds_16_bits(inner) else EXACT
    # On every rank: copies that have drifted apart show here.
    with errors_on_all_ranks(ranks, (), cannot):
        found = judge(path, ours, theirs, same_weights, arithmetic=arithmetic, rounded=rounded, tensors=tensors)
    return ExportCheck(**ranks.broadcast(attrs.asdict(found)))


def _holds_16_bits(model: "PreTrainedModel | PeftModel") -> bool:
    """Return whether a tensor that takes part in a forward on text has 16 bits."""
    unused = tuple(other_modalities(base_of(model)))
    tensors = (tensor for name, tensor in model.state_dict().items() if not name.endswith(unused))
    return any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)


def _prove_files(
    inner: "PreTrainedModel | PeftModel",
    wrapped: torch.nn.Module,
    whole: Callable[[Wanted], WholeTensors],
    path: Path,
    strategy: "Strategy",
    without: Sequence[str],
) -> tuple[int, set[torch.dtype]]:
    """Return the number of stored tensors and their float dtypes, if all agree; collective."""
    ranks, cannot = strategy.ranks, f"{path} cannot be read back"
    with errors_on_all_ranks(ranks, READING_ERRORS, cannot):
        # On every rank: one whose host does not see the directory would leave the others waiting while they load it.
        files = Files(path, "adapter_model" if is_peft(inner) else "model")
    with errors_on_all_ranks(ranks, READING_ERRORS, cannot):
        layout = None if is_peft(inner) else layout_of(base_of(inner), None, without)
        adapter = adapter_tensors(inner, wrapped, strategy) if is_peft(inner) else {}
        expected = adapter if layout is None else layout.files
        files.prove_names(expected)
    readers: dict[str, int] = {}
    if layout is not None:
        stored = sorted(set(files.places.values()))
        readers = by_tensor(next_rank(rank_of_files(stored, layout, ranks.world_size), ranks.world_size), files.places)
    own = [name for name, rank in readers.items() if rank == ranks.rank]
    tensors = iter(()) if layout is None else whole(destinations(layout, first_names(inner), readers))
    with errors_on_all_ranks(ranks, READING_ERRORS, cannot), files, exhausted(tensors):
        if layout is not None:
            prove_model(files, base_of(inner), layout, tensors, own)
        elif ranks.is_first:
            for name, tensor in adapter.items():
                assert tensor is not None
                files.prove(name, tensor)
    found = ranks.gather(sorted(str(dtype).removeprefix("torch.") for dtype in files.dtypes))
    return len(expected), {getattr(torch, name) for each in found for name in each}


def _prove_reloaded(
    inner: "PreTrainedModel | PeftModel",
    whole: Callable[[Wanted], WholeTensors],
    reloaded: "PreTrainedModel | PeftModel",
    dtypes: set[torch.dtype],
    path: Path,
    strategy: "Strategy",
    without: Sequence[str],
) -> bool:
    """Return whether a tensor was rounded, if `reloaded` holds the model's; collective."""
    ranks, cannot = strategy.ranks, f"{path} cannot be compared"
    rounded = False
    with errors_on_all_ranks(ranks, READING_ERRORS, cannot):
        ours, theirs = without_added(first_names(inner), without), without_added(first_names(reloaded), without)
        prove_reloaded_names(ours, theirs, path)
        # One is gathered beside the other, so both must give the same tensors in the same order.
        prove_reloaded_names(set(ours.values()), set(theirs.values()), path)
    # Each rank compares some, and gets those of both models.
    shares = {name: (index % ranks.world_size,) for index, name in enumerate(dict.fromkeys(ours.values()))}
    pairs = zip(whole(shares), plain_tensors(reloaded, strategy.whole(reloaded, shares), None, without), strict=True)
    with errors_on_all_ranks(ranks, READING_ERRORS, cannot), exhausted(pairs):
        for (name, wanted), (_, found) in pairs:
            if wanted is not None and found is not None:
                rounded |= prove_reloaded_tensor(name, wanted, found, dtypes, path)
    return ranks.any(rounded)


def _score_there(reloaded: torch.nn.Module, samples: Sequence[Sample], strategy: "Strategy") -> Score:
    """Compute a reloaded model's score on the strategy's device, wherever its weights are."""
    beside = strategy.device.type != "cpu" and not strategy.divides
    on_host = beside and all(parameter.device.type == "cpu" for parameter in reloaded.parameters())
    with streamed(reloaded, strategy.device) if on_host else nullcontext():
        return _score(reloaded, samples, strategy.device, reloaded=True)


def _score(model: torch.nn.Module, samples: Sequence[Sample], device: torch.device, *, reloaded: bool = False) -> Score:
    try:
        return score(model, samples, device, reloaded=reloaded)
    finally:
        # A forward without a backward leaves FSDP's last weights gathered, where changes of the shards would not reach them.
        resharded(model)
