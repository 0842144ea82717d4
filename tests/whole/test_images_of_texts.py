"""Prompts of plain text with images: sft is plain transformers on `processor(text=..., images=..., suffix=...)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForMultimodalLM, AutoProcessor
from transformers.image_utils import load_image

import forge
import forge_data

from . import pictures
from .conftest import write_rows
from .three_steps import SETTINGS, figures, oracle

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 96}
ROWS = 18
ASKED = ("caption", "")


def _row(folder: Path, number: int) -> dict[str, Any]:
    """One image before the prompt, two at marks in it, or none, in turn."""
    (folder / "images").mkdir(exist_ok=True)
    count = (1, 2, 0)[number % 3]
    files = [f"images/{number}_{each}.png" for each in range(count)]
    for each, file in enumerate(files):
        pictures.picture(10 * number + each).save(folder / file)
    prompt = f"caption the picture {number} in a few words"
    prompt = f"<image>before {prompt} <image>" if count == 2 else prompt
    return {"prompt": prompt, "completion": f"\n {number} plums and a cherry", **({"images": files} if files else {})}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in a file, beside their images."""
    folder = tmp_path_factory.mktemp("texts")
    return write_rows(folder / "rows.jsonl", [_row(folder, number) for number in range(ROWS)])


@pytest.fixture(scope="module", params=["paligemma", "llava"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose processor takes a suffix, and one whose processor takes one text; neither has a chat template."""
    folder = pictures.save(request.param, tmp_path_factory.mktemp(request.param))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def run(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on all parts, and an answer at their end."""
    out = tmp_path_factory.mktemp("run") / "run"
    parts = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "save_dtype": "float32"}
    asked = write_rows(data.parent / "asked.jsonl", [{"prompt": prompt, "images": ["images/0_0.png"]} for prompt in ASKED])
    asks = {"eval_prompts": [str(asked)], "eval_max_new_tokens": 8}
    return forge.sft(model_path=str(model), data_path=str(data), ckpt_output_dir=out, **GIVEN, **parts, **asks).output_dir


def _asked(processor: Any, row: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """What the processor makes of a row, as its documentation asks it, with `labels`."""
    images = [load_image(str(folder / file)) for file in row.get("images", [])]
    eos, count = processor.tokenizer.eos_token, row["prompt"].count("<image>")
    prompt = row["prompt"] if count else "<image>" * len(images) + row["prompt"]
    if not images:
        ids = processor.tokenizer(prompt + row["completion"] + eos, return_tensors="pt")["input_ids"]
        learned = len(processor.tokenizer(row["completion"] + eos)["input_ids"])
        marks = {"token_type_ids": torch.ones_like(ids)} if _takes_suffix(processor) else {}
        return {"input_ids": ids, "labels": _labels(ids, learned)} | marks
    if _takes_suffix(processor):
        arrays = processor(text=[prompt], images=[images], suffix=[row["completion"]], return_tensors="np")
        return {name: torch.as_tensor(array) for name, array in arrays.items()}
    made = dict(processor(text=[prompt + row["completion"] + eos], images=[images], return_tensors="pt"))
    return made | {"labels": _labels(made["input_ids"], len(processor.tokenizer(row["completion"] + eos)["input_ids"]))}


def _takes_suffix(processor: Any) -> bool:
    return type(processor).__name__ == "PaliGemmaProcessor"


def _labels(ids: torch.Tensor, learned: int) -> torch.Tensor:
    return torch.where(torch.arange(ids.shape[1]) >= ids.shape[1] - learned, ids, -100)


def test_losses(run: Path, model: Path, data: Path) -> None:
    """Ids, labels, losses and gradient norms of tower, projector and language part are plain transformers'."""
    processor: Any = AutoProcessor.from_pretrained(model)
    given = [json.loads(line) for line in data.read_text().splitlines()]

    def inputs(store: forge_data.TokenStore, at: int) -> dict[str, torch.Tensor]:
        made = _asked(processor, given[int(store.source(at).rpartition(":")[2]) - 1], data.parent)
        assert made.pop("input_ids")[0].tolist() == store[at].input_ids.tolist()
        assert made.pop("labels")[0].tolist() == store[at].labels.tolist()
        return made

    log = (run / "log.txt").read_text()
    # In transformers 5.23 PaliGemma's documents lie in padded lines.
    assert ("images: several in a row" in log) is (_takes_suffix(processor) <= (transformers.__version__ >= "5.24"))
    assert ": loaded back, " in log
    plain = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    expected = oracle(run, plain, inputs=inputs)
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)


def test_asked(run: Path, data: Path) -> None:
    """`forge generate` and `eval_prompts` put images before a prompt without marks, and answer as plain transformers."""
    (export,) = (run / "hf_format").glob("samples_*")
    processor: Any = AutoProcessor.from_pretrained(export)
    plain: Any = AutoModelForMultimodalLM.from_pretrained(export, dtype=torch.float32)
    file = data.parent / "images" / "0_0.png"
    answers = [json.loads(line)["answer"] for line in (run / "answers.jsonl").read_text().splitlines()][-len(ASKED) :]
    for prompt, answer in zip(ASKED, answers, strict=True):
        arrays = processor(text=[f"<image>{prompt}"], images=[[load_image(str(file))]], return_tensors="np")
        inputs = {name: torch.as_tensor(array) for name, array in arrays.items() if name != "labels"}
        made = plain.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        expected = processor.decode(made, skip_special_tokens=True).strip()
        assert expected
        assert forge.generate(run, prompt, image=[file], max_new_tokens=8) == expected
        assert answer == expected
