"""Runs on made-up chips (tests/forge-accel/devices/chips) beside the same runs on the CPU, in a process of their own.

    python -m tests.whole.made_up_chips LIBRARY MODEL FOLDER CASE...

A case is KIND:VERB, KIND:VERB:ADAPTER, KIND:VERB:ADAPTER:FAMILY of `pictures` on rows with media, whose tower and projector
train too where there is no adapter, any of these with settings (`?optimizer=muon`), KIND:fake, a step of a model with
a billion parameters whose tensors hold no data, or KIND:exchange, a parameter that is moved in place.
Prints one JSON line a case: the steps on both, whether every tensor of the two exports
and of the two last full states has the same bits, whether a run that was resumed in its middle is the same too, what of the
vendor's module was called, and where steps after the first copied a tensor to the chip in such a way that a GPU's host waits.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER = Path(__file__).parents[1] / "forge-accel" / "devices" / "chips"


def main(library: str, model: str, folder: str, *cases: str) -> None:
    """Run the cases."""
    sys.path.insert(0, str(FOLDER))
    import stand_ins
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import forge
    import forge_accel
    import forge_algos

    from .verbs import settings_of

    loaded = stand_ins.load_chips(library)
    copies, train = Copies(), forge_algos.train
    forge_algos.train = lambda *args, **how: copies.in_steps(train(*args, **how))  # type: ignore[assignment]
    # The vendors' libraries are the folder's stand-ins; a file stands in for the driver's.
    for each in (forge_accel.HPUAccelerator, forge_accel.NPUAccelerator):
        each.nodes = (library,)
    for case in cases:
        path, _, more = case.partition("?")
        parts = path.split(":")
        kind, verb, adapter, family = *parts, *("none", "")[len(parts) - 2 :]
        sys.path.append(str(FOLDER / "libraries" / kind))
        chips = stand_ins.use_chips(loaded, kind)
        if verb == "fake":
            print(json.dumps({"case": case, **fake_step(kind)}), flush=True)
            continue
        if verb == "exchange":
            print(json.dumps({"case": case, **exchanged(kind)}), flush=True)
            continue
        where = Path(folder) / case.replace(":", "_").replace("?", "_")
        where.mkdir()
        own = media_settings(verb, family, where) if family else settings_of(verb, Path(model), where)
        given = {**own, "keep_full_state": True, "dtype": "float32"}
        if adapter != "none":  # a verb such as osft has one of its own
            given["adapter"] = adapter
        elif family:
            tower = "audio" if family == "qwen2-audio" else "vision"
            given |= {f"freeze_{tower}_tower": False, "freeze_multi_modal_projector": False}
        given |= {"full_state_every_steps": 2, "keep_last_n": 2}
        given |= {name: yaml.safe_load(value) for name, value in parse_qsl(more)}
        sys.path.append(str(where))  # its rewards
        chip = forge_accel.accelerator(kind)
        # The CPU's own fused AdamW adds in another order than the unfused one that some chips take.
        forge_accel.CPUAccelerator.fused_optimizer = property(lambda _, chip=chip: chip.fused_optimizer)  # type: ignore[assignment]
        run: Any = getattr(forge, verb)
        copies.found.clear()
        operations = loaded.chips_operations()
        # torch's flash attention is the CPU's alone; the plain way is the same everywhere.
        with sdpa_kernel(SDPBackend.MATH):
            run(**given, device=kind, ckpt_output_dir=where / "chip")
            operations = loaded.chips_operations() - operations
            run(**given, device="cpu", ckpt_output_dir=where / "cpu")
            state = min(str(each) for each in (where / "chip" / "full_state").glob("step_*"))
            run(**given, device=kind, ckpt_output_dir=where / "resumed", resume=state)
        print(
            json.dumps(
                {
                    "case": case,
                    "chip": steps(where / "chip"),
                    "cpu": steps(where / "cpu"),
                    "resumed": steps(where / "resumed"),
                    "exports": same(where / "chip" / "hf_format", where / "cpu" / "hf_format"),
                    "resumed_exports": same(where / "chip" / "hf_format", where / "resumed" / "hf_format"),
                    "operations": operations,
                    "peak": max(chips.bytes("peak"), 0),
                    "calls": sorted({name for name, _ in chips.calls}),
                    "waits": sorted(copies.found),
                    "log": (where / "chip" / "log.txt").read_text(),
                }
            ),
            flush=True,
        )


def media_settings(verb: str, family: str, folder: Path) -> dict[str, Any]:
    """Make a tiny model of a family and rows with its media, and return settings of a short run."""
    from transformers import AutoModelForMultimodalLM, AutoModelForSequenceClassification

    from . import pictures
    from .conftest import write_rows
    from .verbs import KINDS, SHORT, VERBS

    labelled = verb in {"classify", "reward"}
    auto = AutoModelForSequenceClassification if labelled else AutoModelForMultimodalLM
    labels = {"num_labels": 1 if verb == "reward" else 2} if labelled else {}
    model = pictures.save(family, folder / "model", auto, **labels)
    medium = {"qwen2-audio": "audio", "qwen3-vl": "video"}.get(family, "image")
    chats = [pictures.conversation(folder, each, (each + 1) % 3, medium) for each in range(24)]
    made: dict[str, Callable[[], Path]] = {
        "pairs": partial(pictures.pairs, folder, kind=medium),
        "answers": partial(pictures.rated, folder, kind=medium),
        "prompts": partial(pictures.prompts, folder, kind=medium),
    }
    kind = KINDS[verb]
    if kind == "labelled":
        chats = [row | {"label": f"LABEL_{each % 2}"} for each, row in enumerate(chats)]
    elif kind == "texts":
        chats = [{"query": row["messages"][:1], "positive": f"number {each} is red"} for each, row in enumerate(chats)]
    data = made[kind]() if kind in made else write_rows(folder / "media.jsonl", chats)
    (folder / "forge_test_rewards.py").write_text(
        "def short(prompts, completions, **_):\n    return [-len(one[-1]['content']) / 10 for one in completions]\n"
    )
    given: dict[str, Any] = {"model_path": str(model), "data_path": str(data), **SHORT, **VERBS[verb]}
    if verb == "distill":
        given["teacher_path"] = str(pictures.save(family, folder / "larger", seed=21))
    return given


class Copies(TorchDispatchMode):
    """Record where steps copy tensors to a device in such a way that the host waits for what the device still has to do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def in_steps(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield a run's steps; its first, with what is tried once, is not recorded."""
        yield from itertools.islice(steps, 1)
        while True:
            with self:
                step = next(steps, None)
            if step is None:
                return
            yield step

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        source = (
            args[1] if func is torch.ops.aten.copy_.default else args[0] if func is torch.ops.aten._to_copy.default else None
        )
        waits = not (kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and args[2:3] == (True,)))
        if source is not None and waits and source.device.type == "cpu" != made.device.type:
            ours = [frame for frame in traceback.extract_stack() if "/forge_" in frame.filename]
            self.found.add(f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere")
        return made


def fake_step(kind: str) -> dict[str, Any]:
    """Take a step of SFT in shapes on a device; and one with a tensor of the CPU among them, which must fail."""
    import numpy as np
    from transformers import AutoModelForCausalLM, LlamaConfig

    import forge_algos

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}
    config = LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)

    class Row:
        """A packed row of two documents."""

        input_ids = np.arange(512) + 3
        position_ids = np.concatenate([np.arange(200), np.arange(312)])
        cu_seqlens = np.array([0, 200, 512])
        labels = np.where(position_ids == 0, -100, input_ids)
        max_seqlen = 312

    def step(planted: bool) -> int:
        rehearsal = forge_algos.Rehearsal(device=torch.device(kind, 0))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        rehearsal.model(model, None)
        with rehearsal.adapting():
            adaptation = forge_algos.adapt(model, forge_algos.AdapterSettings())
        model = rehearsal.placed(adaptation.model)
        if planted:
            # As a buffer that somebody made in a forward and forgot to move.
            model.model.norm.register_forward_hook(lambda _, __, output: output * torch.ones(2048, device="cpu"))
        optimizer = forge_algos.make_optimizer(model, forge_algos.OptimizerSettings(), fused=False)
        return rehearsal.step(model, optimizer, [Row()], objective=forge_algos.SFT, adaptation=adaptation).bytes

    peak = step(planted=False)
    try:
        step(planted=True)
    except Exception as error:
        return {"peak": peak, "planted": str(error)}
    return {"peak": peak, "planted": None}


def exchanged(kind: str) -> dict[str, Any]:
    """Move an adapter's parameter to a device as fsdp2 with cpu_offload does, and train it there with its optimizer."""
    from forge_dist.loading._moving import exchange

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    try:
        parameter.data = parameter.detach().to(kind)
        refused = False
    except RuntimeError:
        refused = True
    exchange(parameter, parameter.detach().to(kind))
    (parameter * 2).sum().backward()
    optimizer.step()
    return {"refused": refused, "device": parameter.device.type, "values": parameter.tolist()}


def steps(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def same(one: Path, other: Path) -> dict[str, bool]:
    """Compare every tensor of the last exports of two runs, bit for bit."""
    from safetensors.torch import load_file

    files = [sorted((folder / max(each.name for each in folder.iterdir())).glob("*.safetensors")) for folder in (one, other)]
    assert [file.name for file in files[0]] == [file.name for file in files[1]], files
    found = {}
    for first, second in zip(*files, strict=True):
        ours, theirs = load_file(first), load_file(second)
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        found |= {name: bool((ours[name] == theirs[name]).all()) for name in ours}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
