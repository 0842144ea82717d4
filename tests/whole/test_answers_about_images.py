"""`eval_prompts` with images: answers of the model as plain transformers gives them, at each measurement."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
import forge_data
from forge.reports._report import report

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities, pictures
from .conftest import write_rows
from .verbs import run_verb

TOKENS = 8
SHORT: dict[str, Any] = {
    "max_steps": 2,
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 400,
    "learning_rate": 1e-2,
    "adapter": "lora",
    "eval_max_new_tokens": TOKENS,
}
QUESTION = "what is in it?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 whose answers are not those of the last token alone."""
    from transformers import AutoModelForMultimodalLM

    directory = pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))
    loaded = AutoModelForMultimodalLM.from_pretrained(directory)
    for name, parameter in loaded.named_parameters():
        if "post_attention" in name:
            parameter.data += 5
    loaded.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pictures, and every form of a prompt about the first, about both, and of text."""
    made = tmp_path_factory.mktemp("prompts")
    for number in range(2):
        pictures.picture(number).save(made / f"{number}.png")
    data = "data:image/png;base64," + base64.b64encode((made / "0.png").read_bytes()).decode()
    text = {"type": "text", "text": QUESTION}
    said = {"role": "assistant", "content": "a plum"}
    prompts = [
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "0.png"}, text]}]},
        {"prompt": QUESTION, "image": str(made / "0.png")},
        {"messages": [{"role": "user", "content": f"<image>{QUESTION}"}, said], "images": ["0.png"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data}}, text]}, said]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, text]}], "images": ["0.png", "1.png"]},
        {"prompt": QUESTION},
    ]
    write_rows(made / "asked.jsonl", prompts)
    return made


def answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]


def expected(model: Path, folder: Path) -> list[str]:
    """What `forge generate` answers, which is plain transformers' answer."""
    one, two, none = (
        forge.generate(model, QUESTION, image=[folder / f"{number}.png" for number in range(images)], max_new_tokens=TOKENS)
        for images in (1, 2, 0)
    )
    return [one, one, one, one, two, none]


@pytest.mark.parametrize("images", [True, False])
def test_answers_are_those_of_generate(images: bool, model: Path, folder: Path, tmp_path: Path) -> None:
    """In every form that rows may have, beside rows with images or texts alone; records and report say which image it was."""
    data = pictures.rows(tmp_path, 8) if images else tmp_path / "texts.jsonl"
    if not images:
        write_rows(data, [pictures.conversation(tmp_path, number, 0) for number in range(8)])
    run = tmp_path / "run"
    given = {**SHORT, "model_path": model, "data_path": data, "ckpt_output_dir": run}
    result = forge.sft(**given, eval_prompts=[str(folder / "asked.jsonl")])
    found = answers(run)
    assert [line["step"] for line in found] == [0] * 6 + [2] * 6
    assert [line["answer"] for line in found[:6]] == expected(model, folder)
    assert len({line["answer"] for line in found[:6]}) == 3
    assert [line["answer"] for line in found[6:]] == expected(result.model_dir, folder)
    file = str(folder / "0.png")
    assert found[0]["prompt"] == [
        {"role": "user", "content": [{"type": "image", "image": file}, {"type": "text", "text": QUESTION}]}
    ]
    asked = [line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][0]["content"][0]["image"] for line in found]
    assert asked[:6] == [file, file, file, "messages[0].content[0]", file, QUESTION]
    assert f"after step 2, asked '[0.png] [1.png] {QUESTION}'" in (run / "log.txt").read_text()
    page = report(run).read_text()
    assert f"[0.png] [1.png] {QUESTION}" in page
    assert "attention: sdpa" in (run / "log.txt").read_text()


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Prompts about images of unlike sizes, about two of them and about none; which ones."""
    made = tmp_path_factory.mktemp("unlike")
    for number in range(4):
        pictures.picture(number).save(made / f"{number}.png")
    asked = [[0], [1], [0, 1], [], [2, 3], [3]]
    rows = [{"prompt": [{"role": "user", "content": pictures_of(made, each)}]} for each in asked]
    write_rows(made / "asked.jsonl", rows)
    return made, asked


def pictures_of(folder: Path, numbers: list[int]) -> list[dict[str, str]]:
    """The parts of a question about some pictures."""
    return [*({"type": "image", "image": f"{folder}/{each}.png"} for each in numbers), {"type": "text", "text": QUESTION}]


def spread(name: str, directory: Path) -> Path:
    """A tiny model whose answers are not those of the last token alone."""
    from transformers import AutoModelForMultimodalLM

    loaded = AutoModelForMultimodalLM.from_pretrained(pictures.save(name, directory))
    for parameter_name, parameter in loaded.named_parameters():
        if any(part in parameter_name for part in ("post_attention", "multi_modal_projector", "connector")):
            parameter.data *= 4
    loaded.save_pretrained(directory)
    return directory


def plain_answers(model: Path, folder: Path, asked: list[list[int]]) -> list[str]:
    """What plain transformers answers, without tokens that stand for images."""
    plain, tokenizer = modalities.plain(model).eval(), forge_data.load_tokenizer(model)
    never, found = [*forge_data.MediaInputs(model).token_ids], []
    ends = {tokenizer.eos_token_id, *([plain.generation_config.eos_token_id] if plain.generation_config.eos_token_id else [])}
    for each in asked:
        given = pictures.prompt_inputs(model, [{"role": "user", "content": pictures_of(folder, each)}])
        made = plain.generate(**given, max_new_tokens=TOKENS, do_sample=False, suppress_tokens=never, eos_token_id=[*ends])
        found.append(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


@pytest.mark.parametrize(
    ("verb", "name"),
    ci_keeps(
        [("grpo", "llava-next")],
        [(verb, name) for verb in ("sft", "kto", "grpo") for name in ("gemma3", "llava", "llava-next", "idefics2", "mllama")],
    ),
)
def test_unlike_images(
    verb: str, name: str, unlike: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked together they are answered as alone, by the tower of now; a run's own prompts have images of their own."""
    (tmp_path / "letter_rewards.py").write_text("def letters(completions, **_): return [len(each) for each in completions]")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "letter_rewards", raising=False)
    folder, asked = unlike
    model = spread(name, tmp_path / "model")
    data = {"sft": pictures.rows, "kto": pictures.rated, "grpo": pictures.prompts}[verb](tmp_path)
    own: dict[str, Any] = {"reward": ("letter_rewards:letters",), "max_new_tokens": 5, "num_generations": 3}
    given = SHORT | {"adapter": "none", "save_dtype": "float32", "learning_rate": 1e-3} | (own if verb == "grpo" else {})
    parts = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    given |= {"model_path": str(model), "data_path": str(data), "eval_prompts": [str(folder / "asked.jsonl")]}
    run = getattr(forge, verb)(**given, **parts, ckpt_output_dir=tmp_path / "run")
    found = [line["answer"] for line in answers(run.output_dir)]
    assert found[:6] == plain_answers(model, folder, asked)
    assert len(set(found[:6])) >= 4
    assert found[6:] == plain_answers(run.model_dir, folder, asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    ci_keeps(
        [("gemma3", "fsdp2")],
        [(name, strategy) for name in ("gemma3", "llava-next", "mllama") for strategy in ("fsdp2", "zero3")],
    ),
)
def test_divided_over_ranks(name: str, strategy: str, model: Path, folder: Path, tmp_path: Path) -> None:
    """Ranks that share the weights answer together, also where prompts have images, and rows have or not (Mllama)."""
    model = model if name == "gemma3" else spread(name, tmp_path / "model")
    data = pictures.rows(tmp_path, 8)
    if name == "mllama":
        data = write_rows(tmp_path / "texts.jsonl", [pictures.conversation(tmp_path, number, 0) for number in range(8)])
    given = {**SHORT, "model_path": str(model), "data_path": str(data), "eval_prompts": [str(folder / "asked.jsonl")]}
    for ranks in (1, 2):
        more = {
            "ckpt_output_dir": str(tmp_path / str(ranks)),
            "strategy": "auto" if ranks == 1 else strategy,
            "adapter": "none",
        }
        run_on_ranks(run_verb, ranks, "sft", given | more | {"learning_rate": 1e-4}, joined=False)
    one, two = ([line["answer"] for line in answers(tmp_path / name)] for name in ("1", "2"))
    assert one == two


@pytest.mark.parametrize(
    ("verb", "more", "row", "said"),
    [
        ("pretrain", {}, {"image": "0.png"}, "asked.jsonl:1: has an image, and forge pretrain trains on text alone"),
        ("sft", {"adapter": "prompt"}, {"image": "0.png"}, "the virtual tokens of adapter=prompt move its place"),
        (
            "sft",
            {},
            {"image": "none.png"},
            r"eval_prompts .*asked.jsonl:1: field image: .*none.png cannot be read: No such file",
        ),
        ("sft", {}, {"image": "https://a.b/c.png"}, "field image is .*, and nothing is fetched while training"),
        ("sft", {}, {"images": ["0.png", "1.png"], "prompt": "<image>?"}, "field images holds 2 images, and <image> stands"),
        ("sft", {}, {"videos": ["a.mp4"]}, r"field videos\[0\] is a video, and the processor Gemma3Processor takes images"),
        ("sft", {"model_path": "TEXT"}, {"image": "0.png"}, "asked.jsonl:1: the chat template does not write it"),
        (
            "sft",
            {"model_path": "TEXT", "chat_template": "PARTS"},
            {"image": "0.png"},
            "asked.jsonl:1: there are media, and what re",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(
    verb: str,
    more: dict[str, Any],
    row: dict[str, Any],
    said: str,
    model: Path,
    model_dir: Path,
    chats: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By file and row, before a model is tried or a row is tokenized."""
    monkeypatch.setattr("forge.run._prepare.try_packing", None)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes((folder / f"{number}.png").read_bytes())
    asked = write_rows(tmp_path / "asked.jsonl", [{"prompt": QUESTION, **row}])
    given = {"model_path": model, "data_path": chats, **more, "eval_prompts": [str(asked)], "ckpt_output_dir": tmp_path / "run"}
    if given["model_path"] == "TEXT":
        given["model_path"] = model_dir
    if "chat_template" in given:
        given["chat_template"] = str(tmp_path / "parts.jinja")
        Path(given["chat_template"]).write_text(pictures.TEMPLATE.replace("PLACEHOLDER", "<image>"))
    if verb == "pretrain":
        given["data_path"] = write_rows(tmp_path / "texts.jsonl", [{"text": "a plum"}] * 4)
    with pytest.raises((forge.SettingsError, forge.data.ForgeDataError), match=said) as caught:
        getattr(forge, verb)(**given)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
