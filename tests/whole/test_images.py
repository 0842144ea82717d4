"""Whole runs on rows with images: they are those of plain transformers, one sample a forward, however they are computed."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM, AutoProcessor
from transformers.image_utils import load_image

import forge
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge.backends._trl_run import _pad_ids
from forge.memory import _forecast
from forge.run import _memory, _run

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities, pictures, reference
from .conftest import write_rows
from .starts import sft_with_signal, weights
from .three_steps import SETTINGS, figures, oracle, samples
from .verbs import run_verb

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations."""
    return pictures.rows(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


def same_beside_language(stored: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> None:
    """The tensors of tower and projector are the same bits."""
    language = ("language_model.", "model.text_model.", "lm_head.")
    others = [name for name in stored if not any(part in name for part in language)]
    assert others
    for name in others:
        assert torch.equal(stored[name], written[name]), name


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gemma3", "several in a forward, padded"),
        ("llava", "several in a row"),
        ("llava-next", "several in a row"),
        ("idefics2", "several in a row"),
        ("mllama", "one sample a row"),
    ],
)
def test_losses_and_the_export(name: str, rows: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Losses, gradients and the held-out loss are plain transformers' with its processor; the tower is exported as read."""
    model = model if name == "gemma3" else pictures.save(name, tmp_path / "model")
    settings = GIVEN | {"model_path": str(model), "data_path": str(data), "max_tokens_per_gpu": 384}
    result = forge.sft(**settings, validation_split=0.2, ckpt_output_dir=tmp_path / "run")
    run, inputs, plain = result.output_dir, pictures.inputs_of(model, data), modalities.plain(model)
    assert f"images: {rows}" in (run / "log.txt").read_text()
    store = forge_data.TokenStore.open(run / "data" / "train").split(0.2, seed=42)[1]
    held_out = samples(store, [*range(len(store))], inputs)
    before, tokens = reference.evaluate(plain, held_out)
    expected = oracle(run, plain, held_out=0.2, inputs=inputs)
    assert figures(run, "loss") == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    assert result.eval_before["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert result.eval_before["eval_loss_tokens"] == tokens
    stored, exported = load_file(model / "model.safetensors"), load_file(result.model_dir / "model.safetensors")
    same_beside_language(stored, exported)
    assert any(not torch.equal(stored[name], exported[name]) for name in stored)
    # What is reported after training is measured on the export, loaded again.
    again = AutoModelForMultimodalLM.from_pretrained(result.model_dir, dtype=torch.float32, attn_implementation="eager")
    assert result.eval_after["eval_loss"] == pytest.approx(reference.evaluate(again, held_out)[0], rel=1e-5)


def test_what_is_said_of_images(plain: Path, tmp_path: Path) -> None:
    """The log counts them and their tokens, as the store's numbers do; the card names the processor."""
    store = forge_data.TokenStore.open(plain / "data" / "train")
    images = [image for sample in store for image in sample.media]
    tokens = sum(image.stop - image.start for image in images)
    said = f"; {len(images)} images, for which {tokens} tokens stand, in 16 of the rows"
    assert said in (plain / "log.txt").read_text()
    assert store.media_counts.sum(axis=0).tolist() == [len(images), tokens]
    assert f"{len(images)} images in 16 samples, for which {tokens} tokens stand" in str(forge_data.stats(store))
    card = (forge.export(plain, tmp_path / "export") / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "import AutoModelForMultimodalLM, AutoProcessor" in card


def test_the_memory_plan(given: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what was planned, with pixels, the tower's forward and its weights in float32; what is not counted is said.

    Of a processor whose arrays do not join one sample a row is planned.
    """
    monkeypatch.setattr(_memory, "_SMALL", 0)
    settings = {**given, "max_steps": 2}
    forge.sft(**settings, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.01)
    assert phases["step"]["planned"] >= 0.998 * measured
    plain = AutoModelForMultimodalLM.from_pretrained(model)
    assert phases["step"]["parts"]["weights"] >= 4 * plain.num_parameters()
    assert any("images are counted in padded lines" in note for note in about["notes"])

    with monkeypatch.context() as patched:
        patched.setattr(forge_data.MediaInputs, "joins_of", lambda *_: False)
        forge.sft(**settings, ckpt_output_dir=tmp_path / "single")
    single = json.loads((tmp_path / "single" / "memory.json").read_text())
    taken = {phase["name"]: phase for phase in single["phases"]}
    assert taken["step"]["planned"] == pytest.approx(taken["first steps"]["measured"], rel=0.2)
    assert not any("are counted" in note for note in single["notes"])

    largest = _forecast.largest_micro_batches

    def needs_values(planned: Any) -> Any:
        if planned.media:
            raise forge_algos.RehearsalError("a value")
        return largest(planned)

    monkeypatch.setattr(_forecast, "largest_micro_batches", needs_values)
    forge.sft(**settings, ckpt_output_dir=tmp_path / "other")
    text = (tmp_path / "other" / "log.txt").read_text()
    assert "pixels, and the forward of what computes on them, are not counted: a value" in text


def test_the_memory_plan_of_another_attention(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mllama's layers for images are computed by another attention than texts: the run says what is not counted."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    model = pictures.save("mllama", tmp_path / "model")
    settings = GIVEN | {"model_path": str(model), "data_path": str(data), "max_steps": 1}
    run = forge.sft(**settings, ckpt_output_dir=tmp_path / "run").output_dir
    assert "pixels, and the forward of what computes on them, are not counted: " in (run / "log.txt").read_text()


@pytest.fixture(scope="module")
def loads() -> list[str | None]:
    """The attention with which each model of `plain` was loaded."""
    return []


@pytest.fixture(scope="module")
def plain(given: dict[str, Any], loads: list[str | None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without held-out rows."""
    load = forge_dist.Strategy.load

    def counted(self: forge_dist.Strategy, path: Any, **how: Any) -> Any:
        loads.append(how["attention"])
        return load(self, path, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forge_dist.Strategy, "load", counted)
        return forge.sft(**given, ckpt_output_dir=tmp_path_factory.mktemp("plain") / "run").output_dir


def test_another_attention_takes_no_other_copy(plain: Path, loads: list[str | None]) -> None:
    """The first choice is causal within an image: the model that is loaded takes the next. What is read again is its export."""
    assert loads == ["documents", None]
    log = (plain / "log.txt").read_text()
    assert "attention: sdpa: the first choice does not fit this model (Gemma3ForConditionalGeneration with attention" in log


def test_one_copy_at_a_time(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention of packed rows asked for, the model that was refused is gone before it is loaded again."""
    load, loaded = forge_dist.Strategy.load, list[weakref.ref[Any]]()

    def watched(self: forge_dist.Strategy, path: Any, **how: Any) -> Any:
        assert [each() for each in loaded] == [None] * len(loaded)
        model = load(self, path, **how)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(forge_dist.Strategy, "load", watched)
    with pytest.raises(forge_algos.PackedBatchError, match="lets the tokens of an image or a clip see those behind them"):
        forge.sft(**given, attention="documents", ckpt_output_dir=tmp_path / "run")
    assert len(loaded) == 2


def test_the_base_computes_images(given: dict[str, Any], tmp_path: Path) -> None:
    """The frozen copy that `kl_base` compares with sees what the model sees: at first nothing has moved."""
    result = forge.sft(**given | {"max_steps": 1}, kl_base=True, validation_split=0.2, ckpt_output_dir=tmp_path / "run")
    assert result.eval_before["eval_kl_base"] == 0
    assert result.eval_after["eval_kl_base"] > 0


@pytest.mark.parametrize(
    ("more", "rel"),
    [
        ({"packing": "off", "activation_checkpointing": True}, 1e-6),
        pytest.param({"weights": "bfloat16", "dtype": "bfloat16"}, 5e-3, marks=pytest.mark.slow),
        pytest.param({"adapter": "osft", "unfreeze_rank_ratio": 0.5, "max_steps": 1}, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_other_ways(more: dict[str, Any], rel: float, given: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    """The same losses however they are computed; an adapter begins at the same one."""
    found = figures(forge.sft(**given | more, ckpt_output_dir=tmp_path / "run").output_dir)
    assert found == pytest.approx(figures(plain)[: len(found)], rel=rel)


def test_lora(given: dict[str, Any], model: Path, plain: Path, tmp_path: Path) -> None:
    """It adapts the language part alone, begins at the same loss, and is merged into the whole model."""
    run = forge.sft(**given, adapter="lora", lora_r=4, ckpt_output_dir=tmp_path / "run")
    assert figures(run.output_dir)[0] == pytest.approx(figures(plain)[0], rel=1e-6)
    assert all(".language_model." in name for name in load_file(run.model_dir / "adapter_model.safetensors"))
    assert (run.model_dir / "processor_config.json").read_bytes() == (model / "processor_config.json").read_bytes()
    merged = load_file(forge.export(run.output_dir, tmp_path / "merged", merge=True) / "model.safetensors")
    same_beside_language(load_file(model / "model.safetensors"), merged)


def test_packing_is_asked_for(given: dict[str, Any], tmp_path: Path) -> None:
    """Packed rows that the model would mix are refused where somebody asks for them; nothing is left."""
    with pytest.raises(
        forge.SettingsError, match="packing=on: Gemma3.*packed, the first of two comes out otherwise than alone"
    ) as caught:
        forge.sft(**given, packing="on", ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2


def test_causal_attention(given: dict[str, Any], tmp_path: Path) -> None:
    """An attention by which the tokens of an image do not see each other is one error, said once."""
    with pytest.raises(forge_algos.PackedBatchError, match="attention=sdpa or eager") as caught:
        forge.sft(**given, attention="documents", ckpt_output_dir=tmp_path / "run")
    assert str(caught.value).count("lets the tokens of an image or a clip see those behind them") == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2", "hsdp", "zero3"]))
def test_two_ranks(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images, or it has none in the end."""
    numbers = range(12)
    data = write_rows(tmp_path / "few.jsonl", [pictures.conversation(tmp_path, each, int(each % 3 == 0)) for each in numbers])
    run = given | {"data_path": str(data), "effective_batch_size": 4 if strategy == "hsdp" else 3}
    forge.sft(**run, ckpt_output_dir=tmp_path / "one")
    ranks, more = (4, {"shard_size": 2}) if strategy == "hsdp" else (2, {})
    run |= {"strategy": strategy, "ckpt_output_dir": str(tmp_path / "two"), **more}
    run_on_ranks(run_verb, ranks, "sft", run, joined=False)
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "one"), rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2", "hsdp", "zero2", "zero3"]))
def test_layers_of_images_alone(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Mllama's layers that attend to images have no part in rows without: ranks train as one, its tower too."""
    model = pictures.save("mllama", tmp_path / "model")
    numbers = range(12)
    data = write_rows(tmp_path / "few.jsonl", [pictures.conversation(tmp_path, each, int(each % 3 == 0)) for each in numbers])
    run = given | {"model_path": str(model), "data_path": str(data), "effective_batch_size": 4, "freeze_vision_tower": False}
    forge.sft(**run, ckpt_output_dir=tmp_path / "one")
    ranks, more = (4, {"shard_size": 2}) if strategy == "hsdp" else (2, {})
    run |= {"strategy": strategy, "ckpt_output_dir": str(tmp_path / "two"), **more}
    run_on_ranks(run_verb, ranks, "sft", run, joined=False)
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "one"), rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_a_killed_run(given: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    """Killed in its second step and started again it ends with the same bits."""
    settings = given | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="ended with status -9"):
        run_on_ranks(sft_with_signal, 1, settings, "optimizer", 2, "before", joined=False)
    assert len(figures(tmp_path / "run")) == 1
    forge.sft(**settings)
    assert figures(tmp_path / "run") == figures(plain)
    assert weights(tmp_path / "run") == weights(plain)


def test_an_image_that_changes_meanwhile(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changed or gone, it stops the run with its row and file; put back, elsewhere too, the run goes on to the same end."""
    (tmp_path / "here").mkdir()
    data = pictures.rows(tmp_path / "here")
    settings = given | {"data_path": str(data), "full_state_every_steps": 1}
    whole = forge.sft(**settings, ckpt_output_dir=tmp_path / "whole")
    plan = forge_packing.BatchPlan.load(whole.output_dir / "plan" / "plan.npz")
    store = forge_data.TokenStore.open(whole.output_dir / "data" / "train")
    row, image = next((row, store[row].media[-1]) for row in plan.samples(2).tolist() if store[row].media)
    before = (file := Path(image.path)).read_bytes()
    step, steps = torch.optim.AdamW.step, iter(range(9))

    def spoil(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 1:
            file.write_bytes(before + b".")
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    run = tmp_path / "run"
    with pytest.raises(
        forge_data.DataError, match=rf"^{store.source(row)}: .*{file.name} changed since .*put it back"
    ) as caught:
        forge.sft(**settings, ckpt_output_dir=run)
    assert caught.value.exit_status == 2
    forge.sft(**settings, ckpt_output_dir=whole.output_dir)
    assert f"WARNING: {file} changed after this run had read it" in "".join(capsys.readouterr())
    with pytest.raises(forge.SettingsError, match=rf"1 of 24 differ, first {store.source(row)}"):
        forge.sft(**settings, ckpt_output_dir=run)
    file.unlink()
    with pytest.raises(forge_data.DataError, match=rf"{store.source(row)}: .*{file.name} cannot be read"):
        forge.sft(**settings, ckpt_output_dir=run)
    assert (run / "full_state" / "latest").read_text().strip() == "step_2"
    file.write_bytes(before)
    data.parent.rename(tmp_path / "elsewhere")
    forge.sft(**settings | {"data_path": str(tmp_path / "elsewhere" / data.name)}, ckpt_output_dir=run)
    assert "images of data_path are read from where its rows name them now" in (run / "log.txt").read_text()
    assert figures(run) == figures(whole.output_dir)
    assert weights(run) == weights(whole.output_dir)


@pytest.mark.parametrize(
    ("verb", "more", "refusal"),
    [
        ("sft", {"adapter": "prefix"}, "adapter=prefix and rows with images.*lora"),
        ("sft", {"adapter": "prompt"}, "adapter=prompt and rows with images.*lora"),
        ("sft", {"backend": "trl"}, "backend=trl and rows with images.*text alone"),
        ("sft", {"model_path": "TEXT"}, r"rows\.jsonl:1: there are media, and what reads for the model"),
        ("distill", {"teacher_path": "MODEL", "adapter": "prefix"}, "adapter=prefix and rows with images.*lora"),
    ],
)
def test_what_cannot_have_images(
    verb: str, more: dict[str, Any], refusal: str, given: dict[str, Any], model_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """One error before a model is loaded, and no run directory."""
    monkeypatch.setattr(_run, "load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    paths = {"TEXT": str(model_dir), "MODEL": given["model_path"]}
    settings = {name: value for name, value in given.items() if verb == "sft" or name != "moe_aux_loss"}
    with pytest.raises((forge.ForgeError, forge_data.ForgeDataError), match=refusal) as caught:
        getattr(forge, verb)(
            **settings | {name: paths.get(value, value) for name, value in more.items()}, ckpt_output_dir=tmp_path / "run"
        )
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_the_padding_token_of_several_modalities(model: Path) -> None:
    """Backend TRL finds that of the text part, where the whole has none."""
    assert all(token == 0 for _, token in _pad_ids(modalities.plain(model)))


def test_documents_with_images_between_their_texts(tmp_path: Path) -> None:
    """docs/multimodal.md: a template of contents alone, and all tokens learned but those of images, as plain transformers."""
    model, made = pictures.save("llava", tmp_path / "model"), []
    each = "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    parts = "{% for part in message['content'] %}" + each + "{% endfor %}"
    text = "{% if message['content'] is string %}{{ message['content'] }}{% else %}" + parts + "{% endif %}"
    (tmp_path / "contents.jinja").write_text("{% for message in messages %}" + text + "{% endfor %}{{ eos_token }}")
    for number in range(4):
        pictures.picture(number).save(tmp_path / f"{number}.png")
        content = f"page {number} shows <image>, and <image> was before" if number else "nothing is shown here"
        images = {"images": [f"{number}.png", f"{number - 1}.png"]} if number else {}
        made.append({"messages": [{"role": "user", "content": content}]} | images)
    run = forge.sft(
        model_path=model, data_path=write_rows(tmp_path / "rows.jsonl", made), chat_template=tmp_path / "contents.jinja",
        train_on="all", max_steps=1, effective_batch_size=4, ckpt_output_dir=tmp_path / "run",
    )  # fmt: skip
    plain, processor, total, count = modalities.plain(model), AutoProcessor.from_pretrained(model), 0.0, 0
    for row in made:
        images = [load_image(str(tmp_path / name)) for name in row.get("images", ())] or None
        inputs = processor(text=row["messages"][0]["content"] + "<end>", images=images, return_tensors="pt")
        labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == processor.tokenizer.image_token_id, -100)
        with torch.no_grad():
            logits = plain(**inputs).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    assert figures(run.output_dir) == pytest.approx([total / count], rel=1e-6)
