"""An export of a model divided over ranks → the proof that `check_export` gives of one, on every rank or on none."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_dist._third_party_logs import quiet
from forge_dist.adapters._adapter import (
    active_adapter,
    adapter_sources,
    base_of,
    base_path,
    is_peft,
    made_tensors,
    read_adapter,
    unwrapped,
)
from forge_dist.adapters._base_model import adapter_base
from forge_dist.exporting._layout import Whole, first_names, layout_of, owners_of
from forge_dist.exporting._plain import left
from forge_dist.exporting._plain_from_plain import Plain, plain_tensors
from forge_dist.loading._model_path import Task
from forge_dist.loading._quantization import quantization_of
from forge_dist.loading._task import is_reward
from forge_dist.ranks._errors_on_all_ranks import gathering, together
from forge_dist.strategies._replicated import made_whole
from forge_dist.strategies._virtual_tokens import gather_before_lookup, thrown_away
from forge_dist.strategies._wrappers import resharded
from forge_dist.strategies.fsdp._adapter import StandIns
from forge_dist.strategies.zero._parameters import computing, copy_partitioned, fill_partitioned, is_partitioned
from forge_dist.verifying._check import EXACT, HALF, READING, judge
from forge_dist.verifying._loss import Sample, Score, as_for_inference, score
from forge_dist.verifying._result import ExportCheck
from forge_dist.verifying._tensors import Files, prove_model, prove_reloaded_names, prove_reloaded_tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from forge_dist.strategies._strategy import Strategy


def check_divided(
    model: torch.nn.Module,
    path: Path,
    samples: Sequence[Sample],
    *,
    strategy: "Strategy",
    without: Sequence[str],
    plain: Plain | None,
) -> ExportCheck:
    """Compare the export at `path`, which is absolute, with `model` (as `wrap` returned it); collective. See `check_export`.

    Raises:
        ExportError: on every rank, as `check_export`.
    """
    inner, ranks, device = unwrapped(model), strategy.ranks, strategy.device
    base = base_of(inner)
    plain = None if is_peft(inner) else plain
    without = (*without, *thrown_away(inner))

    def whole() -> Whole:
        return plain_tensors(inner, strategy.whole(model), plain, without)

    cannot = f"{path} cannot be read back"
    devices = [] if device.type == "cpu" else [device]
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    # Making an adapter afresh draws random numbers; the run that goes on must not see that.
    with torch.random.fork_rng(devices=devices, **kind), quiet():
        tensors, types = _prove_files(inner, whole(), path, strategy, without)
        with together(ranks, READING, cannot):
            where = str(path)
            if is_peft(inner):
                # Telling a base by what it holds reads all of it.
                where = base_path(path) if ranks.is_first else adapter_base(path).path
        with together(ranks, READING, cannot):
            loader = _without_adapter(strategy) if is_peft(inner) else strategy
            task: Task = "reward" if is_reward(base) else "causal"
            below = loader.load(
                where,
                dtype=base.dtype,
                attention=None,
                task=task,
                quantization=quantization_of(base),
            )
        with together(ranks, READING, cannot):
            reloaded = _read_adapter(below, path, active_adapter(inner)) if is_peft(inner) else below
        gather_before_lookup(reloaded)
        rounded = _prove_reloaded(inner, whole(), reloaded, types, path, strategy, without)
        # The reloaded model decides: sdpa wherever the architecture has it, as for whoever will load the directory.
        with as_for_inference(model, base, str(below.config._attn_implementation)):
            ours = _score(model, samples, device)
        reloaded.eval()
        with computing(reloaded):
            theirs = same_weights = _score(reloaded, samples, device, reloaded=True)
            if rounded:
                # What was exported, computing with the very weights of the model in memory: its configuration is right, or it shows.
                if plain is None:
                    _copy(inner, reloaded)
                else:
                    with together(ranks, READING, cannot):
                        _fill(reloaded, whole(), strategy)
                same_weights = _score(reloaded, samples, device, reloaded=True)
    in_16_bits = ours.in_16_bits or any(t.dtype in (torch.float16, torch.bfloat16) for t in inner.state_dict().values())
    arithmetic = HALF if in_16_bits else EXACT
    # On every rank: copies that have drifted apart show here.
    with together(ranks, (), cannot):
        found = judge(path, ours, theirs, same_weights, arithmetic=arithmetic, rounded=rounded, tensors=tensors)
    return ExportCheck(**ranks.broadcast(attrs.asdict(found)))


def _without_adapter(strategy: "Strategy") -> "Strategy":
    """A strategy that divides alike, and readies a model for no adapter: that of the model in memory is not disturbed."""
    from forge_dist.strategies._choose import make_strategy

    # Every strategy has the settings that it was made by, though the protocol does not say so.
    settings = attrs.evolve(strategy.settings, strategy=strategy.name)
    return make_strategy(settings, strategy.ranks, device=strategy.device, adapter=False)


def _read_adapter(plain: "PreTrainedModel", path: Path, name: str) -> "PeftModel":
    from peft import PeftConfig

    # DoRA's lengths begin as those of the base's rows, which PEFT cannot take of shards.
    dora = getattr(PeftConfig.from_pretrained(str(path)), "use_dora", False)
    meshes = (parameter.device_mesh for parameter in plain.parameters() if isinstance(parameter, DTensor))
    in_steps = any(mesh.ndim > 1 or is_reward(plain) or dora for mesh in meshes)
    return read_adapter(plain, path, name, _attach_to_copies if in_steps else None)


def _attach_to_copies(base: "PreTrainedModel", folder: str, name: str) -> "PeftModel":
    """What PeftModel.from_pretrained does, in two steps: PEFT mistakes the size of weights on a mesh of two dimensions (`StandIns`).

    Nor could it read a whole head into the shards that it copied.
    """
    from peft import PeftConfig, PeftModel, get_peft_model

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    aside = StandIns(base)
    try:
        model = get_peft_model(base, config, adapter_name=name)
    finally:
        aside.restore()
    made_whole(model)
    assert isinstance(model, PeftModel)
    model.load_adapter(folder, name)
    return model


def _prove_files(
    inner: "PreTrainedModel | PeftModel", whole: Whole, path: Path, strategy: "Strategy", without: Sequence[str]
) -> tuple[int, set[torch.dtype]]:
    """How many tensors the files hold, and (on rank 0) which float types, if they are those in memory."""
    ranks = strategy.ranks
    stem = "adapter_model" if is_peft(inner) else "model"
    cannot = f"{path} cannot be read back"
    with together(ranks, READING, cannot):
        # On every rank: one whose host does not see the directory would leave the others waiting while they load it.
        files = Files(path, stem)
        sources = adapter_sources(inner, active_adapter(inner)) if is_peft(inner) else None
        layout = None if is_peft(inner) else layout_of(base_of(inner), None, without)
        made = made_tensors(inner, active_adapter(inner)) if is_peft(inner) else {}
        expected = layout.files if layout is not None else {**(sources or {}), **made}
        files.prove_names(expected)
    with together(ranks, READING, cannot), files, gathering(whole) as tensors:
        if not ranks.is_first:
            pass
        elif layout is not None:
            prove_model(files, base_of(inner), layout, tensors)
        elif sources is not None:
            names = first_names(inner)
            stored: dict[str, list[str]] = {}
            for name, source in sources.items():
                stored.setdefault(names[source], []).append(name)
            for source, tensor in tensors:
                for name in stored.get(source, ()):
                    assert tensor is not None
                    files.prove(name, tensor)
            for name, tensor in made.items():
                files.prove(name, tensor)
    return len(expected), files.floats


def _prove_reloaded(
    inner: "PreTrainedModel | PeftModel",
    whole: Whole,
    reloaded: "PreTrainedModel | PeftModel",
    types: set[torch.dtype],
    path: Path,
    strategy: "Strategy",
    without: Sequence[str],
) -> bool:
    """Whether a tensor was rounded, if `reloaded`, divided as `model` is, holds the same tensors. The same answer on every rank."""
    ranks = strategy.ranks
    rounded = False
    with together(ranks, READING, f"{path} cannot be compared"):
        ours, theirs = left(first_names(inner), without), left(first_names(reloaded), without)
        prove_reloaded_names(ours, theirs, path)
        # One is put together beside the other, so both must give the same tensors in the same order.
        prove_reloaded_names(set(ours.values()), set(theirs.values()), path)
    pairs = zip(whole, plain_tensors(reloaded, strategy.whole(reloaded), None, without), strict=True)
    with together(ranks, READING, f"{path} cannot be compared"), gathering(pairs):
        for (name, wanted), (_, found) in pairs:
            if wanted is not None and found is not None:
                rounded |= prove_reloaded_tensor(name, wanted, found, types, path)
    return bool(ranks.broadcast(rounded))


def _score(model: torch.nn.Module, samples: Sequence[Sample], device: torch.device, *, reloaded: bool = False) -> Score:
    try:
        return score(model, samples, device, reloaded=reloaded)
    finally:
        # A forward without a backward leaves FSDP's last whole weights in place, and what changes the shards would not reach them.
        resharded(model)


def _copy(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Put the weights of one model into another that is divided alike; collective."""
    ours, theirs = owners_of(source), owners_of(target)
    with torch.no_grad():
        for name in sorted(set(first_names(target).values()) & theirs.keys()):
            wanted, tensor = ours[name], theirs[name]
            if isinstance(wanted, DTensor) and not isinstance(tensor, DTensor):
                continue  # a quantized base, whose copy is not divided, and which nothing rounds
            if isinstance(wanted, torch.nn.Parameter) and isinstance(tensor, torch.nn.Parameter) and is_partitioned(tensor):
                copy_partitioned(wanted, tensor)
            else:
                _local(tensor).copy_(_local(wanted))


def _fill(target: torch.nn.Module, tensors: Whole, strategy: "Strategy") -> None:
    """Put whole tensors, which rank 0 has, into a model that is divided; collective."""
    theirs = owners_of(target)
    with gathering(tensors):
        for name, tensor in tensors:
            into = theirs[name]
            if not into.is_floating_point():  # never rounded
                continue
            if isinstance(into, torch.nn.Parameter) and is_partitioned(into):
                fill_partitioned(into, tensor)
                continue
            shared = torch.empty(into.shape, dtype=into.dtype, device=strategy.device)
            if tensor is not None:
                shared.copy_(tensor)
            torch.distributed.broadcast(shared, src=0, group=strategy.ranks.group)
            if isinstance(into, DTensor):
                shared = distribute_tensor(shared, into.device_mesh, into.placements, src_data_rank=None)
            into.copy_(shared)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
