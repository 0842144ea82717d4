"""Vision tower and projector that train: runs are those of plain transformers with torch's AdamW, however they are divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

import forge
import forge_algos
import forge_data
import forge_packing
from forge.run import _memory

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import pictures, reference
from .conftest import conversations, write_rows
from .starts import sft_with_signal, weights
from .three_steps import SETTINGS, figures, oracle, samples
from .verbs import run_verb

GIVEN: dict[str, Any] = {
    **SETTINGS,
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 96,
    "weight_decay": 0.1,
    "save_dtype": "float32",
}
TOWER, PROJECTOR = {"freeze_vision_tower": False}, {"freeze_multi_modal_projector": False}
ALL = TOWER | PROJECTOR
ALONE = {**PROJECTOR, "freeze_language_model": True}
"""LLaVA's first stage."""
LORA: dict[str, Any] = {**TOWER, "adapter": "lora", "lora_r": 4, "save_dtype": None}
PARTS = ("vision_tower", "audio_tower", "multi_modal_projector", "language_model")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model whose documents with images lie in padded lines, and one whose rows are packed and whose last layer is idle."""
    return {name: pictures.save(name, tmp_path_factory.mktemp(name)) for name in ("gemma3", "llava-before-last")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations; the first and the last have no images."""
    folder = tmp_path_factory.mktemp("images")
    return write_rows(folder / "rows.jsonl", [pictures.conversation(folder, each, (each // 3) % 3) for each in range(24)])


@pytest.fixture(scope="module")
def given(models: dict[str, Path], data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(models["gemma3"]), "data_path": str(data), **GIVEN}


def part_of(name: str) -> str:
    """Return the part of the two models that holds a weight."""
    found = [part for part in PARTS if part in name]
    return found[0] if found else "language_model"


def plain_steps(run: Path, model: Path, data: Path, trained: set[str]) -> tuple[Any, list[reference.Step]]:
    """Train plain transformers on the run's samples, one a forward, with torch's AdamW; a step without images counts too."""
    plain: Any = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    inputs = pictures.inputs_of(model, data)
    store = forge_data.TokenStore.open(run / "data" / "train")
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    with_image = next(row for row in range(len(store)) if store[row].media)
    _, _, reached = reference.loss_and_gradients(plain, samples(store, [with_image], inputs))
    # Of what an image does not reach every gradient is zero to the bit.
    idle = {name for name, gradient in reached.items() if part_of(name).endswith("_tower") and not gradient.any()}
    # Qwen2-Audio's sinusoids, which its class freezes and from_pretrained does not.
    idle |= {name for name in reached if "audio_tower.embed_positions" in name}
    moving = {name: p for name, p in plain.named_parameters() if part_of(name) in trained and name not in idle}
    groups = [{"params": [p for p in moving.values() if (p.dim() > 1) == m], "weight_decay": 0.1 * m} for m in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    steps = []
    for step in range(plan.num_steps):
        loss, count, gradients = reference.loss_and_gradients(plain, samples(store, plan.samples(step).tolist(), inputs))
        gradients = {name: gradient for name, gradient in gradients.items() if name in moving}
        for name, gradient in reference.clip(gradients, 0.5).items():
            moving[name].grad = gradient
        optimizer.step()
        steps.append(reference.Step(loss, count, reference.norm(gradients), 1e-3))
    return plain, steps


def same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    """The same names and, to rounding, numbers."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The scores of a query all move by the same with it: its gradient is rounding, which AdamW makes steps of.
        if name.endswith("k_proj.bias"):
            continue
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "settings", "trained"),
    [
        ("gemma3", ALL, {"vision_tower", "multi_modal_projector", "language_model"}),
        ("llava-before-last", TOWER, {"vision_tower", "language_model"}),
        ("gemma3", ALONE, {"multi_modal_projector"}),
    ],
)
def test_losses_and_weights(
    name: str, settings: dict[str, Any], trained: set[str], models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and all weights after three steps are plain AdamW's; what is frozen is exported as it was read."""
    given = GIVEN | {"model_path": str(models[name]), "data_path": str(data)}
    result = forge.sft(**given, **settings, ckpt_output_dir=tmp_path / "run")
    plain, expected = plain_steps(result.output_dir, models[name], data, trained)
    assert figures(result.output_dir) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(result.output_dir, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    before, after = load_file(models[name] / "model.safetensors"), load_file(result.model_dir / "model.safetensors")
    plain.save_pretrained(tmp_path / "plain")
    same_weights(after, load_file(tmp_path / "plain" / "model.safetensors"))
    moved = {part_of(key) for key, tensor in before.items() if not torch.equal(tensor.float(), after[key])}
    assert moved == trained
    text = (result.output_dir / "log.txt").read_text()
    assert "parts: weights that train: language_model " in text
    assert ("stay as they are: no image or clip of the rows reaches them" in text) == ("vision_tower" in trained)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 conversations, of which every third has an image: ranks and whole steps are without."""
    folder = tmp_path_factory.mktemp("few")
    return write_rows(folder / "few.jsonl", [pictures.conversation(folder, each, int(each % 3 == 0)) for each in range(12)])


@pytest.fixture(scope="module")
def one(given: dict[str, Any], few: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs on one rank, by their settings."""
    made: dict[str, Path] = {}

    def run(settings: dict[str, Any]) -> Path:
        key = json.dumps(settings, sort_keys=True)
        if key not in made:
            where = tmp_path_factory.mktemp("one") / "run"
            made[key] = forge.sft(
                **given | {"data_path": str(few), "effective_batch_size": 3} | settings, ckpt_output_dir=where
            )
        return made[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "settings"),
    ci_keeps(
        [({"strategy": "fsdp2"}, ALL), ({"strategy": "zero3"}, ALL)],
        [
            ({"strategy": "ddp"}, ALL),
            ({"strategy": "fsdp2"}, ALL),
            ({"strategy": "fsdp2"}, ALONE),
            ({"strategy": "zero2"}, ALL),
            ({"strategy": "zero3"}, ALL),
            ({"strategy": "zero3"}, ALONE),
            ({"strategy": "fsdp2", "tp_size": 2}, ALL),
            ({"strategy": "ddp"}, LORA),
            ({"strategy": "fsdp2"}, LORA),
            ({"strategy": "zero3"}, LORA),
        ],
    ),
)
def test_two_ranks(
    divided: dict[str, Any], settings: dict[str, Any], given: dict[str, Any], few: Path, one: Any, tmp_path: Path
) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images, or no row of a step has any."""
    whole = one(settings)
    run = given | {"data_path": str(few), "effective_batch_size": 3, "ckpt_output_dir": str(tmp_path / "two")} | settings
    run_on_ranks(run_verb, 2, "sft", run | divided, joined=False)
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert figures(tmp_path / "two", name) == pytest.approx(figures(whole.output_dir, name), rel=rel)
    file = "adapter_model.safetensors" if "adapter" in settings else "model.safetensors"
    found = next((tmp_path / "two" / "hf_format").glob(f"samples_*/{file}"))
    same_weights(load_file(found), load_file(whole.model_dir / file), atol=1e-5)


@pytest.fixture(scope="module")
def plain(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of all parts."""
    return forge.sft(**given, **ALL, ckpt_output_dir=tmp_path_factory.mktemp("plain") / "run")


IN_16_BITS: dict[str, Any] = {"weights": "bfloat16", "dtype": "bfloat16", "save_dtype": None}
RECOMPUTED: dict[str, Any] = {"packing": "off", "activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("more", "rel"),
    ci_keeps(
        [(RECOMPUTED, 1e-5)],
        [
            (RECOMPUTED, 1e-5),
            ({"max_tokens_per_gpu": 512, "activation_checkpointing": "selective"}, 1e-5),
            (IN_16_BITS, 1e-2),
            ({"dtype": "bfloat16"}, 1e-2),
        ],
    ),
)
def test_other_ways(more: dict[str, Any], rel: float, given: dict[str, Any], plain: Any, tmp_path: Path) -> None:
    """The same losses however they are computed; trained weights are float32 masters where the computation has 16 bits."""
    found = forge.sft(**given | ALL | more, ckpt_output_dir=tmp_path / "run")
    assert figures(found.output_dir) == pytest.approx(figures(plain.output_dir), rel=rel)


@pytest.mark.slow
def test_a_killed_run(given: dict[str, Any], plain: Any, tmp_path: Path) -> None:
    """Killed in its second step and started again it ends with the same bits; with other parts it is refused."""
    settings = given | ALL | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="ended with status -9"):
        run_on_ranks(sft_with_signal, 1, settings, "optimizer", 2, "before", joined=False)
    with pytest.raises(forge.SettingsError, match="freeze_vision_tower=false, and now `freeze_vision_tower` is true"):
        forge.sft(**settings | {"freeze_vision_tower": True})
    forge.sft(**settings)
    assert figures(tmp_path / "run") == figures(plain.output_dir)
    assert weights(tmp_path / "run") == weights(plain.output_dir)


@pytest.mark.parametrize("settings", ci_keeps([ALL], [ALL, ALONE, {**ALL, "adapter": "lora", "save_dtype": None}]))
def test_the_memory_plan(
    settings: dict[str, Any], given: dict[str, Any], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take what was planned: the backward pass of tower and projector, their gradients and the optimizer's state."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    model = {"model_path": str(models["llava-before-last"]), "max_steps": 2}
    forge.sft(**given | model | settings, ckpt_output_dir=tmp_path / "run")
    phases = {phase["name"]: phase for phase in json.loads((tmp_path / "run" / "memory.json").read_text())["phases"]}
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.005)
    assert phases["step"]["planned"] >= measured


@pytest.fixture(scope="module")
def adapter(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of PEFT on layers of all parts, that is not zero."""
    torch.manual_seed(3)
    model: Any = AutoModelForMultimodalLM.from_pretrained(models["llava-before-last"], dtype=torch.float32)
    targets = r".*(language_model.*(q_proj|down_proj)|vision_tower.*layers.0.*(q_proj|fc2)|multi_modal_projector.*linear_1)"
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(where := tmp_path_factory.mktemp("adapter"))
    return where


def test_an_adapter_in_all_parts(models: dict[str, Path], data: Path, adapter: Path, tmp_path: Path) -> None:
    """It is trained as plain PEFT trains it; its directory and a merged export give the same logits on images."""
    model = models["llava-before-last"]
    settings = GIVEN | {"model_path": str(model), "data_path": str(data), "save_dtype": None, "weight_decay": 0.0}
    result = forge.sft(**settings, **ALL, adapter="lora", adapter_path=str(adapter), ckpt_output_dir=tmp_path / "run")
    base: Any = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    peft = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    inputs = pictures.inputs_of(model, data)
    expected = oracle(result.output_dir, peft, inputs=inputs)
    assert figures(result.output_dir) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(result.output_dir, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    peft.save_pretrained(tmp_path / "plain")
    found = load_file(result.model_dir / "adapter_model.safetensors")
    same_weights(found, load_file(tmp_path / "plain" / "adapter_model.safetensors"))
    assert {part_of(name) for name in found} == {"vision_tower", "multi_modal_projector", "language_model"}
    store = forge_data.TokenStore.open(result.output_dir / "data" / "train")
    (sample,) = samples(store, [next(row for row in range(len(store)) if store[row].media)], inputs)
    base = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = reference.sample_logits(base, sample)
        adapted = reference.sample_logits(PeftModel.from_pretrained(base, result.model_dir), sample)
        merged = forge.export(result.output_dir, tmp_path / "merged", merge=True, dtype="float32")
        whole = AutoModelForMultimodalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")
        torch.testing.assert_close(reference.sample_logits(whole, sample), adapted, rtol=1e-4, atol=1e-5)
    assert (adapted - logits).abs().max() > 1e-2


def test_which_layers_an_adapter_has(given: dict[str, Any], plain: Any, tmp_path: Path) -> None:
    """target_modules names layers of the parts that train; the run begins at the loss of its base."""
    runs = {
        name: forge.sft(**given | LORA | {"max_steps": 1} | more, ckpt_output_dir=tmp_path / name)
        for name, more in {
            "both": {"target_modules": ("q_proj",)},
            "tower": {"target_modules": ("q_proj",), "freeze_language_model": True},
            "whole": {**PROJECTOR, "target_modules": ("fc1", "q_proj"), "modules_to_save": ("multi_modal_projector",)},
        }.items()
    }
    found = {
        name: {part_of(key) for key in load_file(run.model_dir / "adapter_model.safetensors")} for name, run in runs.items()
    }
    assert found == {
        "both": {"vision_tower", "language_model"},
        "tower": {"vision_tower"},
        "whole": {"vision_tower", "language_model", "multi_modal_projector"},
    }
    for run in runs.values():
        assert figures(run.output_dir)[0] == pytest.approx(figures(plain.output_dir)[0], rel=1e-6)


@pytest.fixture(scope="module")
def pairs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run on 12 pairs."""
    settings = {name: value for name, value in GIVEN.items() if name != "moe_aux_loss"}
    data = pictures.pairs(tmp_path_factory.mktemp("pairs"), 12)
    return settings | {"model_path": str(models["gemma3"]), "data_path": str(data), "max_tokens_per_gpu": 160}


@pytest.mark.parametrize(
    ("settings", "kinds"),
    ci_keeps([(LORA, ("stored", "adapter_off"))], [(LORA, ("stored", "adapter_off")), (ALL, ("stored", "live"))]),
)
def test_references(settings: dict[str, Any], kinds: tuple[str, ...], pairs: dict[str, Any], tmp_path: Path) -> None:
    """The reference has the tower of the start: stored, as a frozen copy, and with the adapter off."""
    given = pairs | {"max_steps": 2} | settings
    found = [figures(forge.dpo(**given, reference=kind, ckpt_output_dir=tmp_path / kind).output_dir) for kind in kinds]
    assert found[0][0] == pytest.approx(0.6931, abs=1e-4)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    other = forge.dpo(
        **given | {"freeze_vision_tower": True, "freeze_multi_modal_projector": True}, ckpt_output_dir=tmp_path / "o"
    )
    assert abs(figures(other.output_dir)[1] - found[0][1]) > 1e-6


@pytest.mark.parametrize("verb", ci_keeps(["orpo"], ["orpo", "simpo"]))
def test_preferences_without_a_reference(verb: str, pairs: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    """Their towers move too."""
    run = getattr(forge, verb)(**pairs | ALL | {"max_steps": 1}, ckpt_output_dir=tmp_path / "run")
    before, after = load_file(models["gemma3"] / "model.safetensors"), load_file(run.model_dir / "model.safetensors")
    assert {part_of(key) for key in before if not torch.equal(before[key].float(), after[key])} == set(PARTS) - {"audio_tower"}


def test_unfrozen_parameters(given: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    """They choose among the weights of the parts that train; a part of which they name nothing is refused."""
    named = ("model.vision_tower.*layers.0.mlp", "model.language_model.norm")
    run = forge.sft(**given | TOWER | {"max_steps": 1}, unfrozen_parameters=named, ckpt_output_dir=tmp_path / "run")
    before, after = load_file(models["gemma3"] / "model.safetensors"), load_file(run.model_dir / "model.safetensors")
    moved = {key for key in before if not torch.equal(before[key].float(), after[key])}
    assert moved, moved
    assert all(".mlp." in key or key.endswith("language_model.model.norm.weight") for key in moved)
    with pytest.raises(
        forge.SettingsError, match="freeze_vision_tower=False.*unfrozen_parameters names nothing of it"
    ) as caught:
        forge.sft(**given | TOWER, unfrozen_parameters=named[1:], ckpt_output_dir=tmp_path / "none")
    assert caught.value.exit_status == 2
    with pytest.raises(forge_algos.AdapterError, match="is frozen in this model"):
        forge.sft(**given, unfrozen_parameters=named, ckpt_output_dir=tmp_path / "none")


@pytest.mark.parametrize(
    ("verb", "more", "refusal"),
    [
        ("sft", {"freeze_language_model": True}, "freeze_language_model=True: nothing would train"),
        ("sft", {**TOWER, "data_path": "TEXT"}, "freeze_vision_tower=False: no row of data_path has an image"),
        ("sft", {**TOWER, "model_path": "TEXT MODEL", "data_path": "TEXT"}, "freeze_vision_tower=False: no row of data_path"),
        ("sft", {**TOWER, "adapter": "osft"}, "freeze_vision_tower=False and adapter=osft"),
        ("osft", PROJECTOR, "freeze_multi_modal_projector=False and adapter=osft"),
        ("sft", {**TOWER, "adapter": "ia3"}, "freeze_vision_tower=False and adapter=ia3"),
        (
            "sft",
            {**TOWER, "adapter": "lora", "init_lora_weights": "eva"},
            "freeze_vision_tower=False and init_lora_weights=eva",
        ),
        ("sft", {**TOWER, "backend": "trl"}, "freeze_vision_tower=False has no effect with backend=trl: its rows are text"),
        ("pretrain", TOWER, "freeze_vision_tower=False has no effect with forge pretrain"),
        (
            "sft",
            {**ALL, "adapter": "lora"},
            "freeze_multi_modal_projector=False: nothing of it would train: adapter=lora is put",
        ),
        ("sft", {**TOWER, "adapter": "lora", "target_modules": ("o_proj",)}, "target_modules names nothing of it"),
        ("sft", {**TOWER, "adapter": "lora", "adapter_path": "ADAPTER"}, "is not an adapter of this Gemma3"),
        ("sft", {"adapter": "lora", "adapter_path": "ADAPTER", "model_path": "LLAVA"}, "set freeze_vision_tower=False"),
    ],
)
def test_what_is_refused(
    verb: str,
    more: dict[str, Any],
    refusal: str,
    given: dict[str, Any],
    models: dict[str, Path],
    adapter: Path,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    """One error that says what to do, and no run directory."""
    text = write_rows(tmp_path / "text.jsonl", conversations(8))
    names = {"TEXT": text, "TEXT MODEL": model_dir, "ADAPTER": adapter, "LLAVA": models["llava-before-last"]}
    settings = {name: value for name, value in given.items() if name not in ("moe_aux_loss", "save_dtype")}
    settings |= {name: str(names[value]) if value in (*names,) else value for name, value in more.items()}
    with pytest.raises((forge.ForgeError, forge_algos.ForgeAlgosError), match=refusal) as caught:
        getattr(forge, verb)(**settings, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
