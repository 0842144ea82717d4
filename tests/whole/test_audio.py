"""Whole runs on rows with audio: they are those of plain transformers, one conversation a forward."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoProcessor

import forge
import forge_algos
import forge_data
import forge_packing
from forge._errors import SettingsError
from forge.cli._app import main
from forge.run import _memory, _run
from forge.talking import _transformers_server
from forge.talking._requests import BadRequest
from forge_algos import online

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import (
    modalities,
    pictures,
    policies,
    test_images_of_answers,
    test_images_of_pairs,
    test_images_of_teachers,
    test_images_online,
)
from .conftest import conversations, write_rows
from .starts import metrics, weights
from .test_trained_parts import part_of, plain_steps, same_weights
from .three_steps import SETTINGS, assert_as_plain, figures, oracle, samples
from .verbs import run_verb

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed here: forge-data[audio]")
pytest.importorskip("soxr", reason="soxr is not installed here: forge-data[audio]")

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 192}
OTHERS: dict[str, Any] = {name: value for name, value in GIVEN.items() if name != "moe_aux_loss"} | {"max_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("qwen2-audio", tmp_path_factory.mktemp("qwen2-audio"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 conversations with one clip, with two, and with none, of unlike rates, channels and lengths."""
    return pictures.rows(tmp_path_factory.mktemp("audio"), 18, kind="audio")


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


@pytest.fixture(scope="module")
def whole(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return forge.sft(**given, keep_full_state=True, ckpt_output_dir=folder).output_dir


def test_sft(whole: Path, model: Path, data: Path) -> None:
    """Losses and gradients are plain transformers' with its processor; the tower is exported as read."""
    assert_as_plain(whole, model, modalities.plain(model), pictures.inputs_of(model, data), "audio_tower")


ALL: dict[str, Any] = {"freeze_audio_tower": False, "freeze_multi_modal_projector": False}
TRAINED: dict[str, Any] = {"weight_decay": 0.1, "save_dtype": "float32"}


@pytest.fixture(scope="module")
def trained(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps in which tower and projector train too."""
    return forge.sft(**given | ALL | TRAINED, ckpt_output_dir=tmp_path_factory.mktemp("trained") / "run").output_dir


def test_the_tower_trains(trained: Path, model: Path, data: Path, tmp_path: Path) -> None:
    """Packed: losses, gradient norms and all weights are those of plain transformers with torch's AdamW."""
    parts = {"language_model", "audio_tower", "multi_modal_projector"}
    plain, expected = plain_steps(trained, model, data, parts)
    assert figures(trained) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(trained, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    (export,) = (trained / "hf_format").glob("samples_*")
    before, after = load_file(model / "model.safetensors"), load_file(export / "model.safetensors")
    plain.save_pretrained(tmp_path / "plain")
    same_weights(after, load_file(tmp_path / "plain" / "model.safetensors"))
    assert {part_of(key) for key, tensor in before.items() if not torch.equal(tensor.float(), after[key])} == parts
    assert "parts: weights that train: language_model " in (trained / "log.txt").read_text()


@pytest.mark.parametrize("name", ["glm-asr", "qwen3-asr"])
def test_processors_of_one_clip(name: str, tmp_path: Path) -> None:
    """Packed, beside rows without audio; two clips in a row are one error."""
    if name == "qwen3-asr":
        pytest.importorskip("transformers", minversion="5.24")
    model = pictures.save(name, tmp_path / "model")
    # Qwen3-ASR's processor, with which the losses are compared, takes no text without a clip.
    rows = [pictures.conversation(tmp_path, each, int(name == "qwen3-asr" or each % 2), "audio") for each in range(6)]
    given = {"model_path": str(model), **GIVEN, "max_tokens_per_gpu": 400}
    data = write_rows(tmp_path / "rows.jsonl", rows)
    run = forge.sft(**given, data_path=str(data), ckpt_output_dir=tmp_path / "run").output_dir
    assert "audio: several in a row" in (run / "log.txt").read_text()
    expected = oracle(run, modalities.plain(model), inputs=pictures.inputs_of(model, data))
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    rows = [pictures.conversation(tmp_path, each, each % 2, "audio") for each in range(2)]
    data = write_rows(tmp_path / "text.jsonl", rows * 3)
    forge.sft(**given, data_path=str(data), ckpt_output_dir=tmp_path / "text")
    two = write_rows(tmp_path / "two.jsonl", [pictures.conversation(tmp_path, 0, 2, "audio")])
    with pytest.raises(forge_data.DataError, match=r"two\.jsonl:1: the processor .* refuses the row: ") as caught:
        forge.sft(**given, data_path=str(two), ckpt_output_dir=tmp_path / "two")
    assert caught.value.exit_status == 2


def test_what_is_said_of_audio(whole: Path, tmp_path: Path) -> None:
    """The log counts clips and their tokens, as the store's numbers do; the card names the processor."""
    store, log = forge_data.TokenStore.open(whole / "data" / "train"), (whole / "log.txt").read_text()
    clips, tokens = store.media_counts.sum(axis=0).tolist()
    assert f"; {clips} audio clips, for which {tokens} tokens stand, in 12 of the rows" in log
    assert "audio: several in a row: " in log
    assert "image" not in log
    card = (forge.export(whole, tmp_path / "export") / "README.md").read_text()
    assert "pipeline_tag: audio-text-to-text" in card
    assert "processor of text and audio" in card or "# of text and audio" in card


@pytest.mark.parametrize("tower", [False, True])
def test_lora(tower: bool, given: dict[str, Any], whole: Path, model: Path, data: Path, tmp_path: Path) -> None:
    """It adapts the parts that train, and begins at the same loss; plain transformers loads what was merged."""
    parts, settings = (ALL if tower else {}), given | {"max_steps": 1 + tower, "adapter": "lora", "lora_r": 4}
    run = forge.sft(**settings, **parts, ckpt_output_dir=tmp_path / "run")
    assert figures(run.output_dir)[0] == pytest.approx(figures(whole)[0], rel=1e-6)
    found = {part_of(name) for name in load_file(run.model_dir / "adapter_model.safetensors")}
    assert found == {"language_model", *(("audio_tower", "multi_modal_projector") if tower else ())}
    if tower:
        on = settings | {"max_steps": 3, "adapter_path": str(run.model_dir)}
        more = forge.sft(**on, **parts, ckpt_output_dir=tmp_path / "more").output_dir
        base: Any = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        peft = PeftModel.from_pretrained(base, run.model_dir, is_trainable=True)
        expected = oracle(more, peft, inputs=pictures.inputs_of(model, data))
        assert figures(more) == pytest.approx([step.loss for step in expected], rel=1e-5)
        assert figures(more, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    assert (run.model_dir / "processor_config.json").read_bytes() == (model / "processor_config.json").read_bytes()
    merged = forge.export(run.output_dir, tmp_path / "merged", merge=True)
    AutoModelForMultimodalLM.from_pretrained(merged)
    assert AutoProcessor.from_pretrained(merged).feature_extractor.sampling_rate == 16_000


def trainable(model: Path, tower: bool) -> Any:
    """The saved model as transformers loads it; its tower and projector learn too, but for sinusoids that its class freezes."""
    plain = modalities.plain(model)
    for name, parameter in plain.named_parameters() if tower else ():
        parameter.requires_grad_("embed_positions" not in name)
    return plain


@pytest.mark.parametrize(
    ("verb", "tower"),
    # That preferences have media, and which, is tried with images (test_images_of_pairs.py); the tower learns below.
    ci_keeps([], [(verb, tower) for verb in ("dpo", "orpo", "simpo") for tower in (False, True)]),
)
def test_preferences(verb: str, tower: bool, model: Path, tmp_path: Path) -> None:
    """Their prompts have clips."""
    data = pictures.pairs(tmp_path, 15, kind="audio")
    settings = {"model_path": str(model), "data_path": str(data), **OTHERS, "validation_split": 0.2, "max_tokens_per_gpu": 400}
    more = test_images_of_pairs.OWN[verb] | (ALL if tower else {})
    run = getattr(forge, verb)(**settings | more, ckpt_output_dir=tmp_path / "run")
    before, expected = test_images_of_pairs.oracle(
        run.output_dir, trainable(model, tower), test_images_of_pairs.LOSSES[verb], data, model
    )
    assert run.eval_before["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)


@pytest.mark.lane
def test_kto(model: Path, tmp_path: Path) -> None:
    """Rated answers, and their mismatches, which have the clips of their prompts."""
    data = pictures.rated(tmp_path, 15, kind="audio")
    settings = test_images_of_answers.GIVEN | {"model_path": str(model), "data_path": str(data), "max_steps": 2}
    run = forge.kto(**settings, ckpt_output_dir=tmp_path / "run")
    test_images_of_answers.check(run, model, data, kl=True)


def test_distill(model: Path, data: Path, tmp_path: Path) -> None:
    """A teacher of other weights hears what the student hears."""
    teacher = pictures.save("qwen2-audio", tmp_path / "teacher", seed=21)
    settings = {"model_path": str(model), "teacher_path": str(teacher), "data_path": str(data), **OTHERS, "beta": 0.0}
    run = forge.distill(**settings, ckpt_output_dir=tmp_path / "run").output_dir
    store = forge_data.TokenStore.open(run / "data" / "train")
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    rows = samples(store, list(range(len(store))), pictures.inputs_of(model, data))
    student, other = map(modalities.plain, (model, teacher))
    expected = pictures.steps(
        student, plan, lambda taken: test_images_of_teachers.divergence(student, other, [rows[at] for at in taken])
    )
    assert figures(run) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)


@pytest.mark.parametrize(
    ("verb", "tower"),
    ci_keeps([("grpo", False)], [(verb, tower) for verb in ("grpo", "rloo", "ppo") for tower in (False, True)]),
)
def test_rewards(verb: str, tower: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn, log-probabilities, losses and gradients; no token that stands for audio is drawn, however likely."""
    data = pictures.prompts(tmp_path, 12, kind="audio")
    (tmp_path / "picture_rewards.py").write_text(test_images_online.REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "picture_rewards", raising=False)
    settings = test_images_online.GIVEN | test_images_online.OWN[verb] | (ALL if tower else {})
    settings |= {"model_path": str(model), "data_path": str(data), "ckpt_output_dir": str(tmp_path / "run")}
    run = getattr(forge, verb)(**settings).output_dir
    said = (run / "log.txt").read_text()
    assert "audio: several in a row" in said
    assert "image" not in said
    plain, never = trainable(model, tower).eval(), forge_data.MediaInputs(model).token_ids
    assert len(never) == 1
    asked = test_images_online.asked(data, model)
    expected = policies.oracle(run, plain, modalities.plain(model).eval(), asked, never, verb)
    lines = [line for line in metrics(run) if "loss" in line]
    np.testing.assert_allclose([line["loss"] for line in lines], [loss for loss, _ in expected], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], [norm for _, norm in expected], rtol=1e-4, atol=1e-5)
    drawn = online.Rollout.read(run / "rollouts" / "step_1.jsonl").completion_ids
    assert not {int(token) for each in drawn for token in each} & never


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "parts"),
    ci_keeps([("fsdp2", "all")], [(each, parts) for each in ("fsdp2", "zero2", "zero3") for parts in ("all", "language")]),
)
def test_two_ranks(strategy: str, parts: str, given: dict[str, Any], whole: Path, trained: Path, tmp_path: Path) -> None:
    """Divided, a sample a row, it trains as on one rank, packed: also where a rank's row has no clips, and the other's has."""
    whole, more = (trained, ALL | TRAINED) if parts == "all" else (whole, {})
    settings = given | more | {"packing": "off", "strategy": strategy, "ckpt_output_dir": str(tmp_path / "two")}
    run_on_ranks(run_verb, 2, "sft", settings, joined=False, timeout=60)
    assert figures(tmp_path / "two") == pytest.approx(figures(whole), rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(whole, "grad_norm"), rel=1e-4)


def test_a_clip_that_changes_meanwhile(
    given: dict[str, Any], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed it stops the run with its row and file; put back, the run goes on from its second step to the same end."""
    plan = forge_packing.BatchPlan.load(trained / "plan" / "plan.npz")
    store = forge_data.TokenStore.open(trained / "data" / "train")
    row, clip = next((row, store[row].media[-1]) for row in plan.samples(2).tolist() if store[row].media)
    assert clip.path is not None
    before = (file := Path(clip.path)).read_bytes()
    step, steps = torch.optim.AdamW.step, iter(range(9))

    def spoil(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 1:
            file.write_bytes(before + b".")
        return step(*args, **kwargs)

    settings = given | ALL | TRAINED | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", spoil)
        with pytest.raises(forge_data.DataError, match=rf"{store.source(row)}: .*{file.name} changed since") as caught:
            forge.sft(**settings)
    assert caught.value.exit_status == 2
    file.write_bytes(before)
    forge.sft(**settings)
    assert "resuming after step 2" in (tmp_path / "run" / "log.txt").read_text()
    assert figures(tmp_path / "run") == figures(trained)
    assert weights(tmp_path / "run") == weights(trained)


@pytest.mark.lane
def test_the_memory_plan(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what was planned, with spectrograms and the tower's forward."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    forge.sft(**given | {"max_steps": 2}, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.01)
    assert phases["step"]["planned"] >= 0.999 * measured
    assert "samples with audio clips are counted as packed, which not every model can be" in about["notes"]


@pytest.mark.parametrize(
    ("verb", "more", "refusal"),
    [
        ("sft", {"adapter": "prefix"}, "adapter=prefix and rows with audio clips.*lora"),
        (
            "sft",
            {"freeze_vision_tower": False},
            "no row of data_path has an image.* Rows with audio train by freeze_audio_tower=F",
        ),
        (
            "sft",
            {"freeze_audio_tower": False, "data_path": "NONE"},
            "freeze_audio_tower=False: no row of data_path has audio, so",
        ),
        (
            "sft",
            {"freeze_multi_modal_projector": False, "data_path": "NONE"},
            "no row of data_path has an image, a video or audio, so",
        ),
        ("pretrain", {"freeze_audio_tower": False}, "freeze_audio_tower=False has no effect with forge pretrain"),
        ("sft", {"model_path": "TEXT"}, r"rows\.jsonl:1: there are media, and what reads for the model"),
    ],
)
def test_what_cannot_have_audio(
    verb: str, more: dict[str, Any], refusal: str, given: dict[str, Any], model_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """One error before a model is loaded, and no run directory."""
    monkeypatch.setattr(_run, "load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    settings = {name: value for name, value in given.items() if verb == "sft" or name != "moe_aux_loss"}
    names = {"TEXT": model_dir, "NONE": write_rows(tmp_path / "none.jsonl", conversations(8))}
    settings |= {name: str(names[value]) if value in (*names,) else value for name, value in more.items()}
    with pytest.raises((forge.ForgeError, forge_data.ForgeDataError), match=refusal) as caught:
        getattr(forge, verb)(**settings, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_a_model_that_hears_nothing(given: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """A model of text that passes over spectrograms is refused, whatever processor lies beside it."""
    deaf = tmp_path / "deaf"
    AutoModelForCausalLM.from_config(modalities.plain(model).config.text_config).save_pretrained(deaf)
    AutoProcessor.from_pretrained(model).save_pretrained(deaf)
    with pytest.raises(forge_algos.PackedBatchError, match="deaf cannot be given the rows' media: .*hears no audio") as caught:
        forge.sft(**given | {"model_path": str(deaf)}, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2


def heard(model: Path, clips: list[Path], text: str, tokens: int) -> str:
    """The answer by plain transformers, in float32."""
    processor: Any = AutoProcessor.from_pretrained(model)
    content = [*({"type": "audio", "audio": str(each)} for each in clips), {"type": "text", "text": text}]
    inputs = pictures.prompt_inputs(model, [{"role": "user", "content": content}])
    plain: Any = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32)
    made = plain.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_a_model_is_asked_about_audio(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `forge generate` and in a conversation, as plain transformers; what is no clip is said."""
    clips = sorted((data.parent / "images").glob("*.wav"))[:2]
    words = [word for file in clips for word in ("--audio", str(file))]
    assert main(["generate", str(model), *words, "what is said?", "--max-new-tokens", "8"]) == 0
    said = capsys.readouterr().out.strip()
    assert said == heard(model, clips, "what is said?", 8)
    lines = ["/audio none.wav", f"/audio {model / 'config.json'}", "so?", f"/audio {clips[0]}", "what is said?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    forge.chat(model, max_new_tokens=8)
    told = capsys.readouterr()
    assert told.out.strip() == heard(model, clips[:1], "what is said?", 8)
    assert "audio none.wav: there is no such file. Give a WAV, FLAC, Ogg or MP3 file." in told.err
    assert "config.json cannot be read as audio" in told.err
    with pytest.raises(forge_data.TokenizerError, match="is an image, and the processor Qwen2AudioProcessor takes audio clips"):
        forge.generate(model, "what?", image=[model / "config.json"])


def test_a_clip_of_one_token(model: Path, tmp_path: Path) -> None:
    """transformers' own `generate` of Qwen2-Audio ends in a TypeError there: one error that names the clip."""
    soundfile.write(clip := tmp_path / "short.wav", np.full(640, 0.1, np.float32), 16_000)
    with pytest.raises(TypeError):
        heard(model, [clip], "what?", 2)
    with pytest.raises(SettingsError, match=r"the model cannot run .*short\.wav: TypeError: .*\. Give a longer clip"):
        forge.generate(model, "what?", audio=[clip], max_new_tokens=2)


@pytest.mark.parametrize("samples", [0, 1, 300])
def test_a_clip_of_a_request(samples: int, model: Path) -> None:
    """One of which the model makes no token is an error of the request, and one that it hears passes."""
    pytest.importorskip("fastapi")
    with io.BytesIO() as file:
        soundfile.write(file, np.zeros(samples, np.float32), 16_000, format="WAV")
        clip = file.getvalue()
    _transformers_server._processor.set(AutoProcessor.from_pretrained(model))
    with pytest.raises(BadRequest, match=f"of its {samples} samples the model can make nothing: .*(too short|no samples)"):
        _transformers_server.hear(clip, "messages[0]")
    with io.BytesIO() as file:
        soundfile.write(file, np.zeros(4_000, np.float32), 16_000, format="WAV")
        _transformers_server.hear(file.getvalue(), "messages[0]")
    _transformers_server.hear(b"no clip", "messages[0]")


def test_answers_while_training(given: dict[str, Any], model: Path, data: Path, tmp_path: Path) -> None:
    """`eval_prompts` about a clip, as a part of a content and in a column, are answered as `forge generate` answers."""
    clip = sorted((data.parent / "images").glob("*.wav"))[0]
    asked = [{"role": "user", "content": [{"type": "audio", "audio": str(clip)}, {"type": "text", "text": "what?"}]}]
    write_rows(tmp_path / "asked.jsonl", [{"prompt": asked}, {"prompt": "what?", "audio": str(clip)}])
    more = {"max_steps": 1, "eval_prompts": [str(tmp_path / "asked.jsonl")], "eval_max_new_tokens": 8}
    run = forge.sft(**given | more, ckpt_output_dir=tmp_path / "run").output_dir
    found = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()][:2]
    assert [line["answer"] for line in found] == [forge.generate(model, "what?", audio=[clip], max_new_tokens=8)] * 2
    assert found[0]["prompt"] == found[1]["prompt"] == asked
    assert f"asked '[{clip.name}] what?'" in (run / "log.txt").read_text()
