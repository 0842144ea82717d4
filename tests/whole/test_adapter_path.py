"""A run that goes on from a LoRA adapter: from forge's own export and from PEFT's, on the same base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import forge
import forge_algos
import forge_data

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics
from .test_adaptations import needs_bitsandbytes
from .verbs import run_verb, settings_of

WEIGHTS = "adapter_model.safetensors"
LORA: dict[str, Any] = {"adapter": "lora", "learning_rate": 1e-2, "lr_scheduler": "constant", "max_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows and adapters."""
    return tmp_path_factory.mktemp("adapter_path")


@pytest.fixture(scope="module")
def adapter(model_dir: Path, folder: Path) -> Path:
    """Adapter of rank 4 that a run of SFT exported."""
    given = {
        **settings_of("sft", model_dir, folder),
        **LORA,
        "lora_r": 4,
        "lora_alpha": 12.0,
        "target_modules": ("q_proj", "up_proj"),
    }
    return Path(run_verb("sft", {**given, "ckpt_output_dir": str(folder / "first")})["model_dir"])


def going_on(verb: str, model_dir: Path, folder: Path, adapter_path: Path, run: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run that goes on from the adapter."""
    given = {**settings_of(verb, model_dir, folder), **LORA, "adapter_path": str(adapter_path), "ckpt_output_dir": str(run)}
    return given | more


def held_out(run: Path, name: str = "eval_loss") -> list[float]:
    """Held-out figures of a run, the first before its first step."""
    return [line[name] for line in metrics(run) if name in line]


def log_of(run: Path) -> str:
    """Text of a run's log."""
    return (run / "log.txt").read_text(encoding="utf-8")


def peft_loss(model_dir: Path, adapter: Path, run: Path) -> float:
    """Loss of PEFT's own model on the rows of a run's first step, one by one."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    store = forge_data.TokenStore.open(run / "data" / "train")
    store, _ = store.split(0.25, seed=42)
    plan = forge.packing.BatchPlan.load(run / "plan" / "plan.npz")
    total, count = 0.0, 0
    for index in plan.samples(0):
        example = store[int(index)]
        ids, labels = (torch.tensor(list(values))[None] for values in (example.input_ids, example.labels))
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        learned = labels[0, 1:] != -100
        total -= logps[learned].gather(1, labels[0, 1:][learned][:, None]).sum().item()
        count += int(learned.sum())
    return total / count


def test_it_begins_where_peft_would_and_exports_beside_the_same_base(
    model_dir: Path, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """The first loss is that of PEFT's trainable model; the export names the base and has the adapter's shape."""
    result = run_verb("sft", going_on("sft", model_dir, folder, adapter, tmp_path))
    first = next(line["loss"] for line in metrics(tmp_path) if "loss" in line)
    assert first == pytest.approx(peft_loss(model_dir, adapter, tmp_path), rel=1e-5)
    exported = Path(result["model_dir"])
    before, after = (json.loads((path / "adapter_config.json").read_text()) for path in (adapter, exported))
    assert before == after
    old, new = (load_file(path / WEIGHTS) for path in (adapter, exported))
    assert old.keys() == new.keys()
    assert not any(torch.equal(old[name], new[name]) for name in old if "lora_B" in name)
    assert "lora_r: 4" in (tmp_path / "config.yaml").read_text()


def test_two_runs_are_joined_without_a_seam(model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """With a rate of nothing an adapter comes out as it went in, bit for bit; the held-out loss goes on from the former."""
    run_verb("sft", going_on("sft", model_dir, folder, adapter, tmp_path, learning_rate=1e-30, weight_decay=0.0))
    old, new = (load_file(path / WEIGHTS) for path in (adapter, next((tmp_path / "hf_format").glob("samples_*"))))
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert held_out(tmp_path)[0] == pytest.approx(held_out(folder / "first")[-1], rel=1e-6)


@pytest.mark.parametrize("reference", ["stored", "live", "adapter_off"])
def test_what_the_reference_of_dpo_is(reference: str, model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """The model as it began, with the adapter (stored, live: no reward yet), or the base without it (adapter_off)."""
    run_verb("dpo", going_on("dpo", model_dir, folder, adapter, tmp_path, reference=reference, max_steps=1))
    margin = held_out(tmp_path, "eval_margin")[0]
    assert abs(margin) < 1e-5 if reference != "adapter_off" else abs(margin) > 1e-4


def test_kl_base_begins_at_nothing(model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """It is measured from the model as the run began, with the adapter."""
    run_verb("sft", going_on("sft", model_dir, folder, adapter, tmp_path, kl_base=True))
    before, after = held_out(tmp_path, "eval_kl_base")
    assert abs(before) < 1e-7
    assert after > 1e-5


def test_a_resume_needs_no_other_directory(model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """The run keeps a copy; another adapter under the same path is refused."""
    own = tmp_path / "adapter"
    shutil.copytree(adapter, own)
    given = going_on("sft", model_dir, folder, own, tmp_path / "run", max_steps=3)
    whole = run_verb("sft", {**given, "ckpt_output_dir": str(tmp_path / "whole")})
    run_verb("sft", {**given, "max_steps": 2})
    assert f"goes on from the adapter in {own} (the run's copy: {tmp_path / 'run' / 'adapter'})" in log_of(tmp_path / "run")
    tensors = load_file(own / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, own / WEIGHTS)
    with pytest.raises(forge.SettingsError, match="is not the one that its run began with"):
        run_verb("sft", given)
    shutil.rmtree(own)
    again = run_verb("sft", given)
    assert log_of(tmp_path / "run").count(f"goes on from the adapter in {own} (") == 2
    one, other = (load_file(Path(result["model_dir"]) / WEIGHTS) for result in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(forge.SettingsError, match="adapter_path"):
        run_verb("sft", {**given, "adapter_path": None, "lora_r": 4, "max_steps": 4})


def test_a_damaged_copy_is_named(model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """A copy without weights, and one that is gone, beside the adapter as it was; another path does not stand for it."""
    given = going_on("sft", model_dir, folder, adapter, tmp_path / "run")
    run_verb("sft", given)
    own = tmp_path / "run" / "adapter"
    with pytest.raises(forge_algos.AdapterError, match="there is no such directory"):
        run_verb("sft", {**given, "adapter_path": str(tmp_path / "never there"), "max_steps": 3})
    (own / WEIGHTS).unlink()
    with pytest.raises(forge.SettingsError, match="is the copy. Put back which of them changed"):
        run_verb("sft", {**given, "max_steps": 3})
    shutil.rmtree(own)
    with pytest.raises(forge.SettingsError, match="is gone from"):
        run_verb("sft", {**given, "max_steps": 3})


@pytest.mark.parametrize("verb", ["reward", "embed"])
def test_an_adapter_of_another_kind_of_model_is_merged_first(
    verb: str, model_dir: Path, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """A reward model from an adapter of SFT: the refusal names the path that was given and what to do, which works."""
    with pytest.raises(forge_algos.AdapterError, match="merge it first .`forge export --merge`") as caught:
        run_verb(verb, going_on(verb, model_dir, folder, adapter, tmp_path / "run"))
    assert f"adapter_path {adapter} (" in str(caught.value)
    assert "It is that of a language model, and this run trains" in str(caught.value)
    assert not (tmp_path / "run").exists()
    merged = forge.export(adapter, tmp_path / "merged", merge=True)
    given = {**settings_of(verb, merged, folder), **LORA, "lora_r": 4, "ckpt_output_dir": str(tmp_path / "run")}
    run_verb(verb, given)
    if verb == "reward":
        with pytest.raises(forge_algos.AdapterError, match="that of a reward model .*give an adapter of such a model"):
            run_verb("sft", going_on("sft", merged, folder, tmp_path / "run", tmp_path / "back"))


@pytest.mark.parametrize("kind", ["SEQ_CLS", "TOKEN_CLS"])
def test_what_an_adapter_says_it_is_for(kind: str, model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """One without a tensor of its own head has the tensors of a language model's, and went on without a word."""
    other = shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"task_type": kind}))
    what = {"SEQ_CLS": "a reward model or classifier", "TOKEN_CLS": "a model for TOKEN_CLS"}[kind]
    with pytest.raises(
        forge_algos.AdapterError, match=f"It is that of {what}, and this run trains a language model: give an ad"
    ):
        run_verb("sft", going_on("sft", model_dir, folder, other, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("org/name", "adapter_path org/name: .*`hf download org/name --local-dir DIR`"),
        ("https://huggingface.co/org/name", "adapter_path org/name: .*`hf download org/name --local-dir DIR`"),
        ("hf://org/name.v1", "`hf download org/name.v1 --local-dir DIR`"),
        ("/nowhere/name", "/nowhere/name: there is no such directory"),
        ("ADAPTER/adapter_model.safetensors", "is a file. Give the directory"),
        ("MODEL", "has no adapter_config.json. It holds a model, which model_path takes"),
    ],
)
def test_what_is_no_adapter_here(
    path: str, message: str, model_dir: Path, folder: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names on the Hub, files and models are answered with what to give."""
    monkeypatch.chdir(tmp_path)
    given = going_on("sft", model_dir, folder, adapter, tmp_path / "run")
    given["adapter_path"] = path.replace("ADAPTER", str(adapter)).replace("MODEL", str(model_dir))
    with pytest.raises((forge.SettingsError, forge_algos.AdapterError), match=message) as caught:
        run_verb("sft", given)
    assert getattr(caught.value, "exit_status", None) == 2
    assert not (tmp_path / "run").exists()


# RsLoRA is LoRA with another scale.
@pytest.mark.parametrize(
    "kind", ci_keeps(["dora", "qlora"], ["rslora", "dora", pytest.param("qlora", marks=needs_bitsandbytes)])
)
def test_other_kinds(kind: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Each goes on where it ended, which is what kl_base measures from."""
    given = {**settings_of("sft", model_dir, folder), **LORA, "adapter": kind, "lora_r": 4}
    first = run_verb("sft", {**given, "ckpt_output_dir": str(tmp_path / "first")})
    run_verb(
        "sft", going_on("sft", model_dir, folder, Path(first["model_dir"]), tmp_path / "second", adapter=kind, kl_base=True)
    )
    assert abs(held_out(tmp_path / "second", "eval_kl_base")[0]) < 1e-6
    assert held_out(tmp_path / "second")[0] == pytest.approx(held_out(tmp_path / "first")[-1], rel=1e-5)


def test_a_wrong_base_is_refused(model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """Other weights than those that forge recorded; where PEFT recorded none, another name is a warning."""
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(other)
    given = going_on("sft", other, folder, adapter, tmp_path / "run")
    with pytest.raises(forge.SettingsError, match="trained beside another base") as caught:
        run_verb("sft", given)
    assert caught.value.exit_status == 2
    foreign = tmp_path / "foreign"
    shutil.copytree(adapter, foreign)
    (foreign / "forge_base.json").unlink()
    run_verb("sft", {**given, "adapter_path": str(foreign)})
    assert "nothing shows whether both have the same weights" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"lora_r": 16}, "lora_r=16"),
        ({"target_modules": ("k_proj",)}, "target_modules"),
        ({"adapter": "dora"}, "adapter=lora"),
        ({"add_tokens": ("<new>",)}, "add_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_what_it_has_cannot_be_changed(
    more: dict[str, Any], match: str, model_dir: Path, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """A setting that says something else than the adapter has is refused by name, before anything is written."""
    with pytest.raises((forge.SettingsError, forge_algos.AdapterError), match=match) as caught:
        run_verb("sft", going_on("sft", model_dir, folder, adapter, tmp_path / "run", **more))
    assert getattr(caught.value, "exit_status", 2) == 2
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_it_took(model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """Rank and scale are the adapter's, and nothing is left behind."""
    given = going_on("sft", model_dir, folder, adapter, tmp_path / "run", kl_base=True)
    found = str(forge.dry_run(forge.sft, **given))
    assert "lora_r=4: that of adapter_path" in found
    assert not (tmp_path / "run").exists()


RANKS = [
    ("sft", {"strategy": "ddp", "kl_base": True}),
    ("sft", {"strategy": "fsdp2", "kl_base": True}),
    ("sft", {"strategy": "zero3", "kl_base": True}),
    ("dpo", {"strategy": "fsdp2", "reference": "live"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "more"), ci_keeps(RANKS[1:2], RANKS))
def test_on_two_ranks(verb: str, more: dict[str, Any], model_dir: Path, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """The losses are those of one process, and so is what the frozen copy of the beginning says."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    settings = going_on(verb, model_dir, folder, adapter, both, **more)
    run_verb(verb, {**settings, "strategy": "single", "ckpt_output_dir": str(alone)})
    run_on_ranks(run_verb, 2, verb, settings, joined=False)
    names = ("loss", "eval_loss", "eval_kl_base", "eval_margin")
    one, other = ([{name: line[name] for name in names if name in line} for line in metrics(run)] for run in (alone, both))
    assert len(one) == len(other)
    for here, there in zip(one, other, strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-7)
