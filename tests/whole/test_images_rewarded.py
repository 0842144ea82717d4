"""Reward models of completions of prompts with images: scores are plain transformers', one conversation a forward."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification

import forge
from forge_algos import online

from . import pictures
from .test_images_online import GIVEN, OWN

if TYPE_CHECKING:
    from pathlib import Path

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

JUDGED: dict[str, Any] = {name: value for name, value in GIVEN.items() if name != "reward"} | OWN["grpo"] | {"max_steps": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with other weights, and its processor."""
    made = tmp_path_factory.mktemp("judge")
    return pictures.save("gemma3", made, AutoModelForSequenceClassification, seed=7, num_labels=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with one image, with two, and with none."""
    return pictures.prompts(tmp_path_factory.mktemp("prompts"), 6)


def plain_judge(path: Path) -> Any:
    """The reward model as transformers itself loads it."""
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scores_are_those_of_plain_transformers(adapted: bool, model: Path, judge: Path, data: Path, tmp_path: Path) -> None:
    """Of each prompt with its images and its completion; also of an adapter that lies without a processor."""
    plain, path = plain_judge(judge), judge
    if adapted:
        made: Any = get_peft_model(plain, LoraConfig(r=4, target_modules=r".*language_model.*q_proj", task_type="SEQ_CLS"))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter += 0.1 * torch.randn_like(parameter) if "lora_" in name else 0
        path = tmp_path / "adapter"
        made.save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(judge / file, path)
        plain = PeftModel.from_pretrained(plain_judge(judge), path).eval()
    settings = JUDGED | {"model_path": str(model), "data_path": str(data), "reward_model_path": str(path)}
    run = forge.grpo(**settings, ckpt_output_dir=tmp_path / "run").output_dir
    rollout = online.Rollout.read(run / "rollouts" / "step_1.jsonl")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    expected = []
    for group, text in zip(rollout.groups, rollout.completion_texts, strict=True):
        prompt = rows[int(rollout.prompt_rows[group])]["prompt"]
        ids, arrays = pictures.read(judge, data.parent, as_parts([*prompt, {"role": "assistant", "content": text}]))
        with torch.no_grad():
            expected.append(float(plain(torch.tensor([ids]), use_cache=False, **arrays).logits[0, 0]))
    assert len(set(expected)) > 6
    assert rollout.scores["reward_model"].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_that_hears_nothing(judge: Path, tmp_path: Path) -> None:
    """One error before a model is loaded."""
    pytest.importorskip("soundfile", reason="soundfile is not installed here: forge-data[audio]")
    model, data = pictures.save("qwen2-audio", tmp_path / "model"), pictures.prompts(tmp_path, 6, kind="audio")
    settings = JUDGED | {"model_path": str(model), "data_path": str(data), "reward_model_path": str(judge)}
    with pytest.raises(
        forge.SettingsError, match=r"reward_model_path .* audio clips: its processor takes images alone"
    ) as caught:
        forge.grpo(**settings, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are all lists of parts."""
    return [
        message
        if isinstance(message["content"], list)
        else message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (False, r"reward_model_path .* and prompts with images: .*no processor .* Take a reward model that sees images"),
        (True, r"reward_model_path .* cannot be given the images of prompts\.jsonl:1: .* Take a reward model that sees images"),
    ],
)
def test_a_reward_model_of_text(processor: bool, says: str, model: Path, judge: Path, data: Path, tmp_path: Path) -> None:
    """One error, also where a processor lies beside it."""
    path = tmp_path / "text"
    config = AutoConfig.from_pretrained(judge).get_text_config()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    for file in judge.iterdir():
        if file.name not in ("config.json", "model.safetensors") and (processor or "processor" not in file.name):
            shutil.copy(file, path)
    settings = JUDGED | {"model_path": str(model), "data_path": str(data), "reward_model_path": str(path)}
    with pytest.raises(forge.SettingsError, match=says) as caught:
        forge.grpo(**settings, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
