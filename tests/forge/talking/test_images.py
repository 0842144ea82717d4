"""A model is asked about images, as it was trained on them."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli._app import main

from ...whole import pictures


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 whose answers are not those of the last token alone, and two pictures in it."""
    from transformers import AutoModelForMultimodalLM

    directory = pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))
    model = AutoModelForMultimodalLM.from_pretrained(directory)
    for name, parameter in model.named_parameters():
        if "post_attention" in name:
            parameter.data += 5
    model.save_pretrained(directory)
    for number in range(2):
        pictures.picture(number).save(directory / f"{number}.png")
    return directory


def expected(directory: Path, images: list[Path], text: str, tokens: int) -> str:
    """The answer by plain transformers, in float32; images stand at `<image>`, or before the text."""
    import torch
    from PIL import Image
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(directory)
    texts = text.split("<image>") if "<image>" in text else ["" for _ in images] + [text]
    parts = [part for each in texts for part in ({"type": "image"}, {"type": "text", "text": each})][1:]
    content = [part for part in parts if part.get("text") != ""]
    asked = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    opened = [[Image.open(file).convert("RGB") for file in images]]
    inputs = processor(text=[asked], images=opened, add_special_tokens=False, return_tensors="pt")
    model: Any = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32)
    made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_an_answer_about_images_is_plain_transformers(pictured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Token for token, from the command; one image less is another question."""
    files = [pictured / "0.png", pictured / "1.png"]
    words = [word for file in files for word in ("--image", str(file))]
    assert main(["generate", str(pictured), *words, "what is in it?", "--max-new-tokens", "16"]) == 0
    said = capsys.readouterr().out.strip()
    assert said == expected(pictured, files, "what is in it?", 16)
    assert said != forge.generate(pictured, "what is in it?", image=files[:1], max_new_tokens=16)


def test_images_at_their_marks(pictured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`<image>` in the prompt is an image's place, as in rows; another number of marks is one error, of flags."""
    files = [pictured / "0.png", pictured / "1.png"]
    text = "is <image>as red as <image>?"
    assert forge.generate(pictured, text, image=files, max_new_tokens=8) == expected(pictured, files, text, 8)
    words = [word for file in files for word in ("--image", str(file))]
    assert main(["generate", str(pictured), *words, "what is <image>?"]) == 2
    said = capsys.readouterr().err
    assert (
        "the prompt has <image> in it 1 time, and --image is given 2 times: give each its place, or leave <image> out" in said
    )


def test_an_adapter_is_asked_with_the_processor_of_its_base(pictured: Path, tmp_path: Path) -> None:
    """Where its directory has none; with virtual tokens it is refused."""
    import peft
    from transformers import AutoModelForMultimodalLM

    given = {"lora": peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")}
    given["prompt"] = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for name, config in given.items():
        base = AutoModelForMultimodalLM.from_pretrained(pictured)
        peft.get_peft_model(base, config).save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(pictured / file, tmp_path / name / file)
    file = pictured / "0.png"
    asked = {"prompt": "what?", "image": [file], "max_new_tokens": 5}
    assert forge.generate(tmp_path / "lora", **asked) == expected(pictured, [file], "what?", 5)
    with pytest.raises(forge.SettingsError, match="virtual tokens move the places of media"):
        forge.generate(tmp_path / "prompt", **asked)


def test_a_conversation_about_an_image(
    pictured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/image` is shown with the next line, and stays in the history; what is no image is said, and it goes on."""
    from forge.talking import _chat

    asked = []
    answer = _chat.AnsweringModel.answer

    def seen(self: Any, messages: Any, sampling: Any, shown: Any, *, media: Any) -> str:
        asked.append((messages[-1]["content"], len(media)))
        return answer(self, messages, sampling, shown, media=media)

    monkeypatch.setattr(_chat.AnsweringModel, "answer", seen)
    file, config = pictured / "0.png", pictured / "config.json"
    lines = [f"/image {file}", "what?", "and?", "/image none.png", f"/image {config}", "so?", "why?", "/reset", "no?", "/help"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    forge.chat(pictured, max_new_tokens=4)
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    so = [{"type": "image"}, {"type": "text", "text": "so?"}]
    assert asked == [(content, 1), ("and?", 1), (so, 2), ("why?", 1), ("no?", 0)]
    said = capsys.readouterr()
    assert said.out.strip().startswith(expected(pictured, [file], "what?", 4))
    assert said.err.count("/image, /video and /audio FILE go with the next line, /reset forgets") == 2
    assert "image none.png: there is no such file" in said.err
    assert "config.json is no image that Pillow knows" in said.err


def test_what_is_no_image_is_refused(pictured: Path, model_dir: Path) -> None:
    """Before a model is loaded where that can be; a model of text, and a placeholder in the text, by name."""
    for image, found in (
        ("https://a.b/c.png", "nothing is fetched"),
        ("c.png", "no such file"),
        ("data:image/png,a", "a data: URI"),
        (str(pictured), "is no file"),
    ):
        with pytest.raises(forge.SettingsError, match=f"^image {image}.*: .*{found}"):
            forge.generate(pictured, "what?", image=[image])
    file = pictured / "0.png"
    with pytest.raises(
        forge.data.TokenizerError,
        match="cannot be asked about media: .* does not take them beside text",
    ):
        forge.generate(model_dir, "what?", image=[file])
    with pytest.raises(forge.data.DataError, match="writes 2 of '<boi>', the placeholder of an image, for 1 image"):
        forge.generate(pictured, "is <boi> it?", image=[file])
    with pytest.raises(forge.data.DataError, match="its text has '<img>' in it, which stands for a part of an image"):
        forge.generate(pictured, "is <img> it?", image=[file])
