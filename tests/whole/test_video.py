"""Whole runs on rows with videos: they are those of plain transformers, one conversation a forward."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

import forge
import forge_algos
import forge_data
import forge_packing
from forge.cli._app import main
from forge.run import _memory
from forge.talking import _transformers_server
from forge.talking._requests import BadRequest, check_messages
from forge.talking._served_generation import Asking
from forge.tasks import _media
from forge_algos import online
from forge_data.media._read import uri_of

from .. import films
from . import modalities, pictures, test_images_online, test_images_served
from .conftest import write_rows
from .starts import weights
from .three_steps import SETTINGS, assert_as_plain, figures

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("qwen3-vl", tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 conversations with one video, with two, and with none, of unlike lengths and sizes; some have an image too."""
    folder = tmp_path_factory.mktemp("videos")
    rows = [pictures.conversation(folder, each, (each + 1) % 3, "video") for each in range(18)]
    for number, row in enumerate(rows[::4]):
        pictures.picture(number).save(folder / f"{number}.png")
        asked = row["messages"][0]
        parts = asked["content"] if isinstance(asked["content"], list) else [{"type": "text", "text": asked["content"]}]
        asked["content"] = [*parts, {"type": "image", "image": f"{number}.png"}]
    return write_rows(folder / "rows.jsonl", rows)


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
    """Losses and gradients are plain transformers' with its processor, packed; the tower is exported as read."""
    export = assert_as_plain(whole, model, modalities.plain(model), pictures.inputs_of(model, data), "visual")
    assert (export / "processor_config.json").read_bytes() == (model / "processor_config.json").read_bytes()


def test_what_is_said_of_videos(whole: Path) -> None:
    """The log counts videos beside images, as the store's numbers do, and says how rows are made."""
    store, log = forge_data.TokenStore.open(whole / "data" / "train"), (whole / "log.txt").read_text()
    media, tokens = store.media_counts.sum(axis=0).tolist()
    assert store.media_kinds == ("image", "video")
    assert f"; {media} images and videos, for which {tokens} tokens stand, in " in log
    assert "images and videos: several in a row: " in log


def test_a_frame_that_changes_meanwhile(
    given: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed it stops the run with its row and file; put back, the run goes on from its second step to the same end."""
    plan = forge_packing.BatchPlan.load(whole / "plan" / "plan.npz")
    store = forge_data.TokenStore.open(whole / "data" / "train")
    found = ((row, each) for row in plan.samples(2).tolist() for each in store[row].media if each.frames)
    row, video = next(found)
    file = Path(str(video.frames[-1].path))
    before, step, steps = file.read_bytes(), torch.optim.AdamW.step, iter(range(9))

    def spoil(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 1:
            file.write_bytes(before + b".")
        return step(*args, **kwargs)

    settings = given | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", spoil)
        with pytest.raises(forge_data.DataError, match=rf"{store.source(row)}: .*{file.name} changed since") as caught:
            forge.sft(**settings)
    assert caught.value.exit_status == 2
    file.write_bytes(before)
    forge.sft(**settings)
    assert "resuming after step 2" in (tmp_path / "run" / "log.txt").read_text()
    assert figures(tmp_path / "run") == figures(whole)
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.lane
def test_the_memory_plan(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what was planned, with pixels and the tower's forward."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    forge.sft(**given | {"max_steps": 2}, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.01)
    assert phases["step"]["planned"] >= 0.999 * measured
    assert "samples with images and videos are counted as packed, which not every model can be" in about["notes"]


def test_documents_that_are_tried(whole: Path, given: dict[str, Any]) -> None:
    """Each mixture of kinds is tried before training, beside a document with most kinds."""
    store = forge_data.TokenStore.open(whole / "data" / "train")
    settings = SimpleNamespace(model=SimpleNamespace(model_path=given["model_path"]))
    documents = _media.media_documents(settings, store.tokenizer(), SimpleNamespace(store=store), None)
    mixtures = {frozenset(medium.kind for medium in sample.media) for sample in store if sample.media}
    arrays = [frozenset(each.inputs) for each in documents]
    assert len(mixtures) == len({*arrays}) == 3
    assert len(arrays[0]) == max(map(len, arrays))


def test_a_model_that_takes_one_kind_at_once(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error before a step, as of GLM-4V, however many rows of one kind stand before."""
    forward = Qwen3VLModel.forward

    def one_kind(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pixel_values") is not None and kwargs.get("pixel_values_videos") is not None:
            raise ValueError("Image features and image tokens do not match")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3VLModel, "forward", one_kind)
    expected = "cannot be given the rows' media: .* cannot run a document with media: Image features and image tokens"
    with pytest.raises(forge_algos.PackedBatchError, match=expected) as caught:
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts with a video file, with two, and with none."""
    data = pictures.prompts(tmp_path, 6, kind="video")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for number, part in enumerate(part for row in rows for part in row["prompt"][0]["content"] if isinstance(part, dict)):
        if part["type"] == "video":
            part["video"] = films.film(tmp_path / f"{number}.mp4", 8 + number, rate=2 + number).name
    write_rows(data, rows)
    (tmp_path / "picture_rewards.py").write_text(test_images_online.REWARDS)
    pictures.import_beside(data, "picture_rewards", monkeypatch)
    return data


def test_a_server_sees_the_videos(model: Path, asked: Path, tmp_path: Path) -> None:
    """vLLM is given the files; its log-probabilities are plain transformers' of the frames that the model's files choose."""
    stub = test_images_served.run("vllm", model, asked, tmp_path / "run", max_steps=1)
    test_images_served.check_asked(stub)
    rollout = online.Rollout.read(tmp_path / "run" / "rollouts" / "step_1.jsonl")
    whole, drawn = test_images_served.expected(rollout, modalities.plain(model).eval(), model, asked)
    torch.testing.assert_close(torch.as_tensor(rollout.sampler_logps), drawn.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.as_tensor(rollout.old_logps), whole.float(), atol=1e-5, rtol=0)


def test_a_server_that_chooses_frames(model: Path, asked: Path, tmp_path: Path) -> None:
    """Of SGLang prompts with videos are refused before it is asked; other tokens of vLLM's say how it is started."""
    more = {"sampler": "sglang", "sampler_url": "http://127.0.0.1:1", "reward": ("picture_rewards:letters",)}
    with pytest.raises(forge.SettingsError, match="sampler=sglang and prompts with videos: it is not known"):
        forge.grpo(model_path=str(model), data_path=str(asked), ckpt_output_dir=tmp_path / "run", **more)
    with pytest.raises(forge_algos.RolloutError, match=r"differ from token 4 on.*--media-io-kwargs .*num_frames"):
        test_images_served.run("vllm", model, asked, tmp_path / "run", fault="other limits")


def test_a_video_as_a_server_is_given_it(tmp_path: Path) -> None:
    """A file as it is; of a list each frame as a PNG, which is read again to the same pixels."""
    file, frames = films.film(tmp_path / "cat.mp4"), [tmp_path / each for each in films.frames(tmp_path, "asked", 2)]
    of_frames = tuple(forge_data.Media("frame", path=str(each)) for each in frames)
    made = forge_data.Media("v", path=str(file), kind="video"), forge_data.Media("v", kind="video", frames=of_frames)
    one, several = (uri_of(each, "a row", 0) for each in made)
    assert base64.b64decode(one.removeprefix("data:video/mp4;base64,")) == file.read_bytes()
    encoded = several.removeprefix("data:video/jpeg;base64,").split(",")
    for written, frame in zip(encoded, frames, strict=True):
        pixels = [Image.open(each).convert("RGB").tobytes() for each in (io.BytesIO(base64.b64decode(written)), frame)]
        assert pixels[0] == pixels[1]


def test_videos_alone_train_the_tower(given: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """`freeze_vision_tower` may be off where rows have videos and no image."""
    rows = [pictures.conversation(data.parent, each, 1, "video") for each in range(6)]
    only = write_rows(data.parent / "only.jsonl", rows)
    run = forge.sft(
        **given | {"data_path": str(only), "max_steps": 1}, freeze_vision_tower=False, ckpt_output_dir=tmp_path / "run"
    ).output_dir
    assert "parts: weights that train: language_model " in (run / "log.txt").read_text()


def shown(model: Path, videos: list[list[str]] | list[str], text: str, tokens: int) -> str:
    """What plain transformers answers."""
    processor = pictures._processor(model)
    inputs = pictures.prompt_inputs(model, [{"role": "user", "content": films.content(text, *videos)}])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    made = modalities.plain(model).eval().generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_a_model_is_asked_about_a_video(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `forge generate` and in a conversation, as plain transformers; what is no video is said."""
    file = films.film(tmp_path / "cat.mp4")
    expected = shown(model, [str(file)], "what is it?", 8)
    assert main(["generate", str(model), "--video", str(file), "what is it?", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == expected
    lines = ["/video none.mp4", f"/video {model / 'config.json'}", "so?", f"/video {file}", "what is it?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    forge.chat(model, max_new_tokens=8)
    told = capsys.readouterr()
    assert told.out.strip() == expected
    assert "video none.mp4: there is no such file. Give an MP4, MOV, WebM or MKV file." in told.err
    assert "config.json cannot be read as a video" in told.err


def test_a_server_reads_a_video_as_training_does(model: Path, tmp_path: Path) -> None:
    """File and list of frames of a request are given to the model as plain transformers gives them by the model's own files."""
    file, frames = films.film(tmp_path / "cat.mp4"), [tmp_path / each for each in films.frames(tmp_path, "asked", 3)]
    one, *several = (base64.b64encode(each.read_bytes()).decode() for each in (file, *frames))
    reading = _transformers_server.as_trained(modalities.plain(model), pictures._processor(model))

    def read(url: str) -> dict[str, Any]:
        asked = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "what?"}]
        Asking.begin().messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": asked}]
        check_messages(Asking.now().messages, "VLM")
        parsed = [{"type": "video", "url": url}, asked[1]], [{"type": "text", "text": "be kind"}]
        conversation = [{"role": "system", "content": parsed[1]}, {"role": "user", "content": parsed[0]}]
        own = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "num_frames": 32, "load_audio_from_video": True}
        return dict(reading.apply_chat_template(conversation, add_generation_prompt=True, tools=None, **own))

    shown = (f"data:video/mp4;base64,{one}", str(file)), (f"data:video/jpeg;base64,{','.join(several)}", [*map(str, frames)])
    for url, video in shown:
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": films.content("what?", video)}]
        made, expected = read(url), pictures.prompt_inputs(model, messages)
        assert {*made} == {*expected} | {"attention_mask"}
        assert all(torch.equal(made[name], each) for name, each in expected.items())
    with pytest.raises(BadRequest, match=r"^field messages\[1\]\.content\[0\]: the video cannot be read as a video"):
        read("data:video/mp4;base64,AAAA")


def test_answers_while_training(given: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """`eval_prompts` about a video, as a part of a content and in a column, are answered alike."""
    frames = [str(data.parent / each) for each in films.frames(data.parent, "asked", 3)]
    asked = [{"role": "user", "content": films.content("what?", frames)}]
    write_rows(tmp_path / "asked.jsonl", [{"prompt": asked}, {"prompt": "what?", "videos": [frames]}])
    more = {"max_steps": 1, "eval_prompts": [str(tmp_path / "asked.jsonl")], "eval_max_new_tokens": 8}
    run = forge.sft(**given | more, ckpt_output_dir=tmp_path / "run").output_dir
    found = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()][:2]
    assert found[0]["answer"] == found[1]["answer"]
