"""Quantization-aware training: the file that is exported holds the numbers that were computed with; or a refusal by name."""

from __future__ import annotations

import builtins
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import forge
import forge_algos
import forge_dist
from forge.cli._app import main
from forge.run import _memory
from forge.talking._model import AnsweringModel, Sampling
from forge_accel.fused import _choices
from forge_algos.online import GenerateSampler, Rollout

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import RUN, final_state, metrics, sft
from .verbs import run_verb, settings_of

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NO_LOSS = -100


@pytest.fixture
def given(with_held_out: dict[str, Any]) -> dict[str, Any]:
    """Three steps with measurements before and after them."""
    return {**with_held_out, **RUN, "num_epochs": None, "max_steps": 3, "full_state_every_steps": 0, "qat": "q4_0"}


def file_of(path: Path) -> dict[str, torch.Tensor]:
    """What transformers reads from a GGUF file, by its names."""
    return dict(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=str(path), dtype=torch.float32).state_dict())


@torch.no_grad()
def held_out_loss(model: Any, run: Path) -> float:
    """Mean loss of the learned tokens of a run's held-out rows, one row after the other: a naive reference."""
    total, count = 0.0, 0
    for row in forge.data.TokenStore.open(run / "data" / "eval"):
        ids, labels = (torch.tensor(np.asarray(each, np.int64)) for each in (row.input_ids, row.labels))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=NO_LOSS, reduction="sum").item()
        count += int((labels[1:] != NO_LOSS).sum())
    return total / count


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights that the last forward read, by their names in the model."""
    plain, found = forge_algos.QuantizedWeights.in_place, dict[str, torch.Tensor]()

    @contextmanager
    def watched(self: Any) -> Any:
        with plain(self):
            found.update({name: tensor.clone() for name, tensor in self._model.state_dict().items()})
            yield

    monkeypatch.setattr(forge_algos.QuantizedWeights, "in_place", watched)
    return found


OTHERS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("q8_0", "q5_0", "q5_1", "q4_1")),
    ("q4_0", {"unfrozen_parameters": ("last:1",)}),
    ("q4_0", {"optimizer": "schedule_free", "lr_scheduler": "constant"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), ci_keeps([("q4_0", {})], [("q4_0", {}), *OTHERS]), ids=str)
def test_the_file_holds_what_was_computed_with(
    kind: str, more: dict[str, Any], given: dict[str, Any], seen: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Each tensor of the exported file is, to the bit, the weight that the last forward read; its loss is the printed one."""
    asked = {"eval_prompts": ("what colour has the plum?",), "eval_max_new_tokens": 8}
    result = forge.sft(**given | asked | more | {"qat": kind}, ckpt_output_dir=tmp_path / "run")
    path = forge.export(result.output_dir, format="gguf")  # of the type that it was trained for
    assert path.name.endswith(f"-{kind}.gguf")
    read = file_of(path)
    assert read.keys() == seen.keys()
    assert all(torch.equal(tensor, seen[name]) for name, tensor in read.items())
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=str(path), dtype=torch.float32)
    printed = result.eval_after["eval_loss"]
    assert held_out_loss(model, result.output_dir) == pytest.approx(printed, rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    message = [{"role": "user", "content": asked["eval_prompts"][0]}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answers = [json.loads(line) for line in (result.output_dir / "answers.jsonl").read_text().splitlines()]
    assert answers[-1]["answer"] == tokenizer.decode(made, skip_special_tokens=True).strip()
    exported = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert exported.dtype == torch.float32
    assert held_out_loss(exported, result.output_dir) != pytest.approx(printed, rel=1e-5)
    log, config = ((result.output_dir / name).read_text() for name in ("log.txt", "config.yaml"))
    assert f"qat: {kind}: 15 weights are rounded wherever the model computes" in log
    assert f"held out, after step 3, with weights rounded to {kind}: loss" in log
    assert "save_dtype: float32  # chosen" in config
    card = (path.parent / "README.md").read_text()
    assert (
        f"weights were rounded to {kind} wherever the model computed. Held-out figures are those of the numbers in this" in card
    )
    assert f"| eval_loss | {result.eval_before['eval_loss']:.4f} | {printed:.4f} |" in card
    assert "These are the unrounded ones" in (forge.export(result.output_dir) / "README.md").read_text()


LORA = {"adapter": "lora", "lora_r": 4}
MERGED = {
    "lora": LORA,
    "rslora": {"adapter": "rslora", "modules_to_save": ("lm_head",), "init_lora_weights": "eva"},
    "dora": {"adapter": "dora", "lora_r": 4},
    "lora_fa": {**LORA, "lora_fa": True, "qat": "q8_0", "target_modules": ("q_proj", "down_proj")},
    "new_tokens": {**LORA, "add_tokens": ("<plum>", "<pear>")},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ci_keeps(["lora"], list(MERGED)))
def test_the_file_of_a_merged_adapter_holds_what_was_computed_with(
    how: str, given: dict[str, Any], seen: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As of whole weights; the base stays as it is, and its adapter is what is exported beside."""
    result = forge.sft(**given | MERGED[how], ckpt_output_dir=tmp_path / "run")
    path = forge.export(result.output_dir, format="gguf", merge=True)
    read = file_of(path)
    held = {name.removeprefix("base_model.model."): tensor for name, tensor in seen.items()}
    places = [
        (name.replace(".weight", f"{beside}.weight"), name)
        for name in read
        for beside in (".modules_to_save.default", ".base_layer", ".token_adapter.base_layer", "")
    ]
    compared = {name: held[place] for place, name in reversed(places) if place in held}
    assert compared.keys() == read.keys()
    for name, rows in held.items():
        if ".trainable_tokens_delta." in name:
            compared[f"{name.partition('.token_adapter')[0]}.weight"][-len(rows) :] = rows
    assert all(torch.equal(tensor, compared[name]) for name, tensor in read.items())
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=str(path), dtype=torch.float32)
    assert held_out_loss(model, result.output_dir) == pytest.approx(result.eval_after["eval_loss"], rel=1e-5)
    assert result.eval_before["eval_loss"] != result.eval_after["eval_loss"]
    assert "the adapter is merged into them before, moves unrounded" in (result.output_dir / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.lane
def test_what_is_asked_and_scored_is_the_model_of_the_file(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], unchecked_exports: None
) -> None:
    """`forge generate` and `forge forgetting` of an adapter's run, and a line says so; an export elsewhere is not rounded."""
    result = forge.sft(**given | LORA | {"max_steps": 2}, ckpt_output_dir=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["qat"] == "q4_0"
    assert "weights rounded to q4_0 wherever the model computed" in (tmp_path / "run" / "report.html").read_text()
    path = forge.export(result.output_dir, format="gguf", merge=True)
    capsys.readouterr()
    asked = AnsweringModel(result.output_dir)
    read = file_of(path)
    assert all(torch.equal(t, read[name].to(t.dtype)) for name, t in asked._model.state_dict().items() if name in read)
    assert "weights rounded to q4_0, as `forge export --format gguf` writes them" in asked.about
    assert forge.generate(result.output_dir, "what colour has the plum?", max_new_tokens=8) == asked.answer(
        [{"role": "user", "content": "what colour has the plum?"}], Sampling(max_new_tokens=8)
    )
    assert "weights rounded to q4_0" in capsys.readouterr().err
    figures = forge.forgetting(result.output_dir, data=given["eval_data_path"])
    assert figures.total.after == pytest.approx(result.eval_after["eval_loss"], rel=1e-5)
    assert figures.total.before == pytest.approx(result.eval_before["eval_loss"], rel=1e-5)
    plain = AnsweringModel(forge.export(result.output_dir, merge=True))
    assert "rounded" not in plain.about
    assert not torch.equal(plain._model.lm_head.weight, asked._model.lm_head.weight)


def test_a_model_in_bfloat16_is_exported_in_every_digit(given: dict[str, Any], tmp_path: Path, unchecked_exports: None) -> None:
    """Its weights train in float32, and what is rounded to the file's type is not rounded to bfloat16 before."""
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(given["model_path"]).to(torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(given["model_path"]).save_pretrained(half)
    result = forge.sft(**given | {"model_path": str(half), "max_steps": 1}, ckpt_output_dir=tmp_path / "run")
    assert AutoModelForCausalLM.from_pretrained(result.model_dir, dtype="auto").dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ci_keeps([{}], [{}, LORA, MERGED["dora"]]), ids=str)
def test_a_run_is_resumed_to_the_bit(adapter: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    """From a full state, which holds the unrounded weights; with another qat, or none, it is refused by name."""
    more = {**given, **adapter, "full_state_every_steps": 1, "keep_full_state": True, "keep_last_n": 4}
    whole = forge.sft(**more, ckpt_output_dir=tmp_path / "whole").output_dir
    again = {**more, "resume": str(whole / "full_state" / "step_1")}
    resumed = forge.sft(**again, ckpt_output_dir=tmp_path / "resumed").output_dir
    assert [line["loss"] for line in metrics(resumed) if "loss" in line][-2:] == [
        line["loss"] for line in metrics(whole) if "loss" in line
    ][-2:]
    assert [line["eval_loss"] for line in metrics(resumed)[-1:]] == [line["eval_loss"] for line in metrics(whole)[-1:]]
    assert final_state(resumed) == final_state(whole)
    (whole / "result.json").unlink()
    for other, said in (("q8_0", "q8_0"), (None, "null")):
        with pytest.raises(forge.SettingsError, match=f"holds a run with qat=q4_0, and now `qat` is {said}.*Give qat=q4_0"):
            forge.sft(**more | {"qat": other}, ckpt_output_dir=whole)


def test_a_finished_run_names_what_is_left_out(given: dict[str, Any], tmp_path: Path, unchecked_exports: None) -> None:
    """Without the qat that it was made with, or another setting; what is given now as it was by default is the same run."""
    more = {**given, "max_steps": 1, "max_samples": 12, "keep_full_state": False}
    run = forge.sft(**more, ckpt_output_dir=tmp_path / "run").output_dir
    for name, was in (("qat", "q4_0"), ("max_samples", "12")):
        now = {each: value for each, value in more.items() if each != name}
        with pytest.raises(forge.RunDirectoryError, match=rf"ask for another one \(`{name}`: {was} → left out\)\. "):
            forge.sft(**now, ckpt_output_dir=run)
    equal = {each: value for each, value in more.items() if each != "keep_full_state"} | {"shuffle": True}
    assert forge.sft(**equal, ckpt_output_dir=run).steps == 1


def test_going_on_without_it_is_warned_of(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model and of an adapter, in a dry run too; with the same type nothing is said."""
    more = {**given, "max_steps": 1, "adapter": "lora", "lora_r": 2}
    adapter = str(forge.sft(**more, ckpt_output_dir=tmp_path / "run").model_dir)
    model = tmp_path / "whole" / "hf_format" / "samples_4"
    shutil.copytree(given["model_path"], model)
    shutil.copy(tmp_path / "run" / "config.yaml", tmp_path / "whole")
    capsys.readouterr()

    def said(**changed: Any) -> str:
        forge.dry_run(forge.sft, **more | changed, ckpt_output_dir=tmp_path / "next")
        return " ".join("".join(capsys.readouterr()).split())

    assert f"WARNING: adapter_path {adapter} was trained with qat=q4_0, and this run has none" in said(
        adapter_path=adapter, qat=None
    )
    assert f"WARNING: model_path {model} was trained with qat=q4_0, and this run has qat=q8_0" in said(
        model_path=str(model), lora_r=4, qat="q8_0"
    )
    assert "was trained with" not in said(adapter_path=adapter)


def test_a_file_of_another_type_is_warned_of(
    given: dict[str, Any], tmp_path: Path, unchecked_exports: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr and in the card; nothing of it where the type is the run's."""
    run = forge.sft(**{**given, "max_steps": 1, "ckpt_output_dir": tmp_path / "run"}).output_dir
    warned = "which is not the type that the run trained for"
    for dtype, is_other in (("q8_0", True), ("bfloat16", True), (None, False)):
        capsys.readouterr()
        path = forge.export(run, format="gguf", dtype=dtype)
        said, card = capsys.readouterr().err, (path.parent / "README.md").read_text()
        assert (f"WARNING: the file will be {dtype}, {warned} (qat q4_0)" in said) == is_other
        assert (f"This file is {dtype}, {warned}: held-out figures are of numbers in q4_0" in card) == is_other


WAYS = {
    "fsdp2": {"strategy": "fsdp2"},
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2"},
    "cp_size": {"strategy": "fsdp2", "cp_size": 2},
    "checkpointing": {"strategy": "fsdp2", "activation_checkpointing": "full", "gather_dtype": "float32"},
    "lora fsdp2": {"strategy": "fsdp2", **LORA},
    "lora hsdp": {"strategy": "hsdp", "shard_size": 2, **LORA},
    "lora ddp": {"strategy": "ddp", **LORA},
    "lora zero2": {"strategy": "zero2", **LORA},
    "rslora fsdp2": {"strategy": "fsdp2", **MERGED["rslora"], "init_lora_weights": "default"},
    "dora ddp": {"strategy": "ddp", **MERGED["dora"]},
}


DIVISION = ("strategy", "cp_size", "shard_size", "gather_dtype")


@pytest.mark.slow
@pytest.mark.parametrize("way", ci_keeps(["lora fsdp2"], list(WAYS)))
def test_ranks_train_what_one_process_does(way: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Losses, held-out loss before and after, and the exported model."""
    if WAYS[way]["strategy"].startswith("zero"):
        pytest.importorskip("deepspeed")
    own = {name: value for name, value in WAYS[way].items() if name not in DIVISION}
    alone = forge.sft(**given | own, ckpt_output_dir=tmp_path / "alone")
    found = run_on_ranks(
        sft, 4 if "hsdp" in way else 2, {**given, **WAYS[way], "ckpt_output_dir": str(tmp_path / "two")}, joined=False
    )
    for name in ("loss", "eval_loss"):
        figures = [[line[name] for line in metrics(tmp_path / run) if name in line] for run in ("two", "alone")]
        assert figures[0] == pytest.approx(figures[1], rel=1e-6), name
    one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (found[0]["model_dir"], alone.model_dir))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.lane
@pytest.mark.parametrize("more", [{}, LORA], ids=str)
def test_compiled_blocks_read_the_rounded_weights(
    more: dict[str, Any], given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs have the losses of the layers that they are made of."""
    monkeypatch.setattr(_choices, "INDUCTOR", "aot_eager")
    for how in ("off", "blocks"):
        forge.sft(**given, **more, compile=how, ckpt_output_dir=tmp_path / how)
    assert "one graph for all of its kind" in (tmp_path / "blocks" / "log.txt").read_text()
    for name in ("loss", "eval_loss"):
        found = [[line[name] for line in metrics(tmp_path / how) if name in line] for how in ("off", "blocks")]
        assert found[1] == pytest.approx(found[0], rel=1e-5)


OF_LORA = [("dpo", LORA), ("dpo", LORA | {"reference": "live"}), ("kto", LORA), ("pretrain", LORA)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "more"),
    ci_keeps(
        [("dpo", LORA)],
        [*((verb, {}) for verb in ("pretrain", "distill", "dpo", "orpo", "simpo", "kto")), *OF_LORA],
    ),
    ids=str,
)
def test_other_verbs(verb: str, more: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """The reference of dpo and the teacher of distill compute unrounded; the model's figures are of rounded weights."""
    given = settings_of(verb, model_dir, tmp_path) | more
    given["max_steps"] = 2
    runs = [getattr(forge, verb)(**given, qat=kind, ckpt_output_dir=tmp_path / str(kind)) for kind in (None, "q4_0")]
    losses = [[line["loss"] for line in metrics(run.output_dir) if "loss" in line] for run in runs]
    assert losses[0] != losses[1]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.2)
    assert runs[0].eval_before["eval_loss"] != runs[1].eval_before["eval_loss"]
    forge.export(runs[1].output_dir, format="gguf", merge=bool(more))


SAMPLING = [
    *((verb, more) for verb in ("grpo", "rloo", "ppo") for more in ({}, LORA)),
    *(("sdft", more | {"teacher": teacher}) for teacher in ("initial", "current") for more in ({}, LORA)),
    *(("distill", more | {"on_policy": 1.0, "max_new_tokens": 6}) for more in ({}, LORA)),
]


@torch.no_grad()
def completion_logps(model: Any, prompt: Any, completion: Any) -> torch.Tensor:
    """The log-probability of each token of a completion, alone: a naive reference."""
    ids = torch.tensor([*prompt, *completion])
    scores = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[len(prompt) :, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "more"), ci_keeps([("grpo", LORA)], SAMPLING), ids=str)
def test_a_policy_samples_as_it_computes(
    verb: str, more: dict[str, Any], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rounded weights, at each of two steps; what it is held against is the unrounded model."""
    sampled, plain = list[Any](), GenerateSampler.sample

    def watched(self: Any, *args: Any, **how: Any) -> Any:
        embedding = self._model.get_input_embeddings().weight.detach().clone()
        sampled.append((embedding, forge_algos.fake_quantize(embedding, "q8_0")))
        return plain(self, *args, **how)

    monkeypatch.setattr(GenerateSampler, "sample", watched)
    given = settings_of(verb, model_dir, tmp_path) | more | {"max_steps": 2, "qat": "q4_0"}
    run_verb(verb, given | {"ckpt_output_dir": str(tmp_path / "run")}, str(tmp_path))
    assert len(sampled) > 1
    assert all(torch.equal(*both) for both in sampled)
    forge.export(tmp_path / "run", format="gguf", merge="adapter" in more)
    if verb not in ("grpo", "rloo", "ppo"):
        return
    rollout = Rollout.read(tmp_path / "run" / "rollouts" / "step_1.jsonl")
    model, first = (AutoModelForCausalLM.from_pretrained(model_dir) for _ in range(2))
    forge_algos.QuantizedWeights(model, forge_dist.rounded_weights(model, "q4_0")).round()
    given = [(rollout.prompt_ids[group], ids) for group, ids in zip(rollout.groups, rollout.completion_ids, strict=True)]
    found = [torch.cat([completion_logps(each, *both) for both in given]) for each in (model, first)]
    np.testing.assert_allclose(rollout.old_logps, found[0], atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-3
    if rollout.ref_logps is not None:
        np.testing.assert_allclose(rollout.ref_logps, found[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    ci_keeps([{}], [{}, {"dtype": "bfloat16"}, {"activation_checkpointing": "full"}, LORA, LORA | {"dtype": "bfloat16"}]),
    ids=str,
)
def test_its_memory_is_planned(
    more: dict[str, Any], given: dict[str, Any], larger_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the unrounded weights lies beside the rounded ones in a step and a measurement: planned, and measured so."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    given |= {"model_path": str(larger_model), "max_steps": 2, "ckpt_output_dir": str(tmp_path / "run"), **more}
    forge.sft(**given)
    phases = {phase["name"]: phase for phase in json.loads((tmp_path / "run" / "memory.json").read_text())["phases"]}
    assert phases["first steps"]["planned"] == pytest.approx(phases["first steps"]["measured"], rel=0.02)
    for name in ("step", "evaluation"):
        parts = phases[name]["parts"]
        # But for the norms, and in a short measurement with what the rounding itself takes.
        assert 0.95 * parts["weights"] < parts["unrounded"] < 1.2 * parts["weights"]
    assert not phases["saving"]["parts"].get("unrounded")
    given |= {"strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "dry")}
    two = {phase["name"]: phase for phase in forge.dry_run("sft", **given, machine="2x24GB").memory["phases"]}
    assert two["step"]["parts"]["unrounded"] == pytest.approx(phases["step"]["parts"]["unrounded"] / 2, rel=0.02)


SERVED = {"reward": "builtins:len", "sampler": "vllm", "sampler_url": "http://localhost:1"}


@pytest.mark.parametrize(
    ("verb", "change", "message"),
    [
        ("sft", {"adapter": "qlora"}, "qat=q4_0 with adapter=qlora, whose base is held in codes.*or set adapter=lora"),
        ("sft", {"adapter": "loha"}, "qat=q4_0 with adapter=loha: what a file of q4_0 rounds is the sum.*or set adapter=lora"),
        ("sft", LORA | {"lora_dropout": 0.1}, "qat=q4_0 with lora_dropout=0.1: steps compute with the merged weight"),
        ("sft", LORA | {"init_lora_weights": "pissa"}, "qat=q4_0 with init_lora_weights=pissa, whose exports add up otherwise"),
        ("osft", {}, "qat=q4_0 with adapter=osft.*Leave `qat` out.$"),
        ("sft", {"weights": "bfloat16"}, "qat=q4_0 with weights=bfloat16"),
        ("sft", {"save_dtype": "bfloat16"}, "qat=q4_0 with save_dtype=bfloat16"),
        ("sft", {"tp_size": 2}, "qat=q4_0 with tp_size=2, which divides the rows"),
        ("sft", {"adapter": "dora", "strategy": "fsdp2"}, "qat=q4_0 with adapter=dora and strategy=fsdp2, which divides"),
        ("sft", {"strategy": "zero3"}, "qat=q4_0 with strategy=zero3"),
        ("sft", {"backend": "trl", "eval_data_path": None}, "qat=q4_0 has no effect with backend=trl: TRL computes with"),
        ("dpo", {"reference": "moving"}, "qat=q4_0 with reference=moving: the reference begins as the model"),
        ("grpo", SERVED, "qat=q4_0 with sampler=vllm, whose server is given the unrounded"),
        ("sdft", {}, "qat=q4_0 with teacher=ema: the teacher begins as the model.*Set teacher=initial"),
        ("reward", {}, "such a file holds a causal language model: forge reward trains another"),
        ("classify", {}, "such a file holds a causal language model: forge classify trains another"),
        ("embed", {}, "such a file holds a causal language model: forge embed trains another"),
        ("sft", {"qat": "q4_k_m"}, "qat must be one of 'q8_0', 'q5_1', 'q5_0', 'q4_1', 'q4_0'"),
        ("sft", {"qat": "mxfp4"}, "qat must be one of"),
        ("sft", {"qat": True}, "qat must be one of"),
    ],
)
def test_what_does_not_go_with_it(
    verb: str, change: dict[str, Any], message: str, with_held_out: dict[str, Any], tmp_path: Path
) -> None:
    """Refused by name before anything is read or written."""
    with pytest.raises(forge.SettingsError, match=message) as caught:
        getattr(forge, verb)(**{**with_held_out, "qat": "q4_0", **change}, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_models_that_gguf_cannot_hold(given: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """Another architecture, and rows that no block of 32 divides: refused before a row is tokenized."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    other, narrow = tmp_path / "gpt2", tmp_path / "narrow"
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)).save_pretrained(other)
    config = AutoModelForCausalLM.from_pretrained(model_dir).config
    config.hidden_size, config.intermediate_size, config.head_dim = 24, 40, 6
    AutoModelForCausalLM.from_config(config).save_pretrained(narrow)
    for path, said in (
        (other, r"gpt2: a GPT2LMHeadModel .*, qwen3\b.*\. Leave `qat` out"),
        (narrow, "no matrix of this model can be"),
    ):
        tokenizer.save_pretrained(path)
        with pytest.raises(forge.SettingsError, match=f"qat=q4_0 is for a GGUF file, which this model cannot be: .*{said}"):
            forge.sft(**given | {"model_path": str(path)}, ckpt_output_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_the_package_gguf_is_needed(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the run is refused at once, with the command that installs it."""
    plain = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(forge.SettingsError, match=r"qat=q4_0 .*need gguf, which is not installed: `pip install 'forge-dist"):
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")


def test_a_dry_run_says_it(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line: what is rounded to which type, and the copy in the memory plan."""
    flags = [
        part
        for name, value in {**given, "ckpt_output_dir": str(tmp_path / "run")}.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert main(["sft", *flags, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "--save-dtype float32: forge export then rounds to q4_0 the very weights that qat rounds" in said.out
    assert "unrounded" in said.err
