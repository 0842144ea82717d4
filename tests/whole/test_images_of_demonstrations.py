"""`forge.sdft` on rows with images: what it learns is what plain transformers makes of its processor's arrays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM

import forge
import forge_algos
from forge._errors import SettingsError

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import pictures
from .conftest import write_rows
from .starts import metrics
from .verbs import run_verb

if TYPE_CHECKING:
    from pathlib import Path

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

GIVEN: dict[str, Any] = {
    "dtype": "float32",
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 400,
    "max_new_tokens": 6,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "seed": 3,
}
TAUGHT = "{prompt}\n\nThis is an example: {demonstration}\n\nAnswer."


def asked(model: Path, folder: Path, row: dict[str, Any], template: str) -> dict[str, torch.Tensor]:
    """What the model's processor makes of a row without its answer, and with it in the question by `template`."""
    *messages, answer = json.loads(json.dumps(row["messages"]))
    if template:
        at = max(k for k, message in enumerate(messages) if message["role"] == "user")
        content = messages[at]["content"]
        before, after = template.replace("{demonstration}", answer["content"]).split("{prompt}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages[at]["content"] = [{"type": "text", "text": before}, *parts, {"type": "text", "text": after}]
    return pictures.prompt_inputs(model, messages, folder)


def logits(plain: Any, inputs: dict[str, torch.Tensor], completion: list[int]) -> torch.Tensor:
    """Logits float[S, V] before each token of a completion behind a prompt."""
    size, more = inputs["input_ids"].shape[1], torch.tensor([completion])
    whole = {**inputs, "input_ids": torch.cat([inputs["input_ids"], more], 1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    if "token_type_ids" in whole:
        whole["token_type_ids"] = torch.cat([inputs["token_type_ids"], torch.zeros_like(more)], 1)
    return plain(**whole).logits[0, size - 1 : -1]


@pytest.mark.parametrize(
    ("family", "teacher"),
    ci_keeps(
        [("gemma3", "ema")],
        [("gemma3", "ema"), ("gemma3", "initial"), ("llava", "ema"), ("llava-next", "ema"), ("qwen2-audio", "ema")],
    ),
)
def test_losses_are_plain_transformers(family: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient norm of the first step; a teacher is shown the images, too."""
    kind = "audio" if "audio" in family else "image"
    model, data = pictures.save(family, tmp_path / "model"), pictures.rows(tmp_path, 12, kind=kind)
    sampled: list[Any] = []
    sample = forge_algos.online.sample_self

    def sample_self(*given: Any, **more: Any) -> Any:
        sampled.append(sample(*given, **more))
        return sampled[-1]

    monkeypatch.setattr(forge_algos.online, "sample_self", sample_self)
    settings = {**GIVEN, "model_path": str(model), "data_path": str(data), "demonstration_template": TAUGHT, "teacher": teacher}
    run = forge.sdft(**settings, ckpt_output_dir=tmp_path / "run").output_dir
    first = next(line for line in metrics(run) if line.get("step") == 1)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    lines = [json.loads(line) for line in (run / "samples" / "step_1.jsonl").read_text().splitlines()]
    plain = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    total, number = torch.zeros(()), 0
    for at, line in enumerate(lines):
        completion = sampled[0].completion_ids[at].tolist()
        student, shown = (asked(model, tmp_path, rows[line["row"]], template) for template in ("", TAUGHT))
        assert student["input_ids"][0].tolist() == sampled[0].prompt_ids[at].tolist()
        assert shown["input_ids"][0].tolist() == sampled[0].teacher_ids[at].tolist()
        own = logits(plain, student, completion).log_softmax(-1)
        with torch.no_grad():
            theirs = logits(plain, shown, completion).log_softmax(-1)
        total = total + (own.exp() * (own - theirs)).sum()
        number += len(completion)
    (total / number).backward()
    norm = torch.stack([p.grad.norm() for name, p in plain.named_parameters() if p.grad is not None and _learns(name)]).norm()
    assert first["loss"] == pytest.approx(float(total.detach()) / number, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def _learns(name: str) -> bool:
    return "_tower" not in name and "multi_modal_projector" not in name and "image_newline" not in name


@pytest.mark.lane
def test_ranks_do_not_change_it(tmp_path: Path) -> None:
    """Two ranks sample the same completions and make the same losses as one process."""
    model, data = pictures.save("gemma3", tmp_path / "model"), pictures.rows(tmp_path, 12)
    settings = {**GIVEN, "model_path": str(model), "data_path": str(data), "num_generations": 2}
    forge.sdft(**settings, ckpt_output_dir=tmp_path / "one")
    two = {**settings, "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "two")}
    run_on_ranks(run_verb, 2, "sdft", two, joined=False)
    first, second = ([line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert second == pytest.approx(first, rel=1e-4)
    assert len({(tmp_path / name / "samples" / "step_1.jsonl").read_text() for name in ("one", "two")}) == 1


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    """A demonstration that is an image is one error, before a model is loaded."""
    model, data = pictures.save("gemma3", tmp_path / "model"), pictures.rows(tmp_path, 4)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    asked = next(part for part in rows[0]["messages"][0]["content"] if part["type"] == "image")
    answer = [{"role": "assistant", "content": [asked, {"type": "text", "text": "a pear"}]}]
    row = {"prompt": rows[0]["messages"][:1], "completion": answer}
    write_rows(data, [row])
    with pytest.raises(SettingsError, match=r"rows\.jsonl:1: its demonstration has an image") as caught:
        forge.sdft(**GIVEN, model_path=str(model), data_path=str(data), ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
