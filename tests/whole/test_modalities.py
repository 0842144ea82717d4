"""Checkpoints of several modalities train on text: the language part learns, the rest is written back bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

import forge
import forge_data
import forge_dist

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities
from .conftest import write_rows
from .three_steps import SETTINGS, figures, oracle, rows
from .verbs import run_verb, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Callable[[str], Path]:
    """A directory of the tiny model of a name, with a tokenizer and processor files."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = modalities.save(name, tmp_path_factory.mktemp("modalities"), model_dir)
        return made[name]

    return directory


def other_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Stored tensors that are no part of the language model."""
    tensors = load_file(directory / "model.safetensors")
    return {name: t for name, t in tensors.items() if "language_model" not in name and "lm_head" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packing"),
    ci_keeps(
        [*((name, "auto") for name in modalities.CONFIGS if name not in ("gemma3", "qwen3.5")), ("gemma3", "off")],
        [*((name, "auto") for name in modalities.CONFIGS), *((name, "off") for name in ("gemma3", "llama4"))],
    ),
)
def test_losses_and_the_export(name: str, packing: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses and gradient norms are those of plain transformers; all but the language part is exported unchanged."""
    if name == "llama4" and not transformers.__version__.startswith("5.23."):
        pytest.skip("transformers 5.24 asks Llama 4's text model for images, so that it has no forward at all")
    run, model = tmp_path / "run", saved(name)
    result = forge.sft(
        model_path=str(model), data_path=str(rows(tmp_path)), ckpt_output_dir=str(run), packing=packing, **SETTINGS
    )
    expected = oracle(run, modalities.plain(model))
    assert figures(run, "loss") == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    export = result.model_dir
    before, after = load_file(model / "model.safetensors"), load_file(export / "model.safetensors")
    assert before.keys() == after.keys()
    others = other_tensors(model)
    assert others
    for tensor, value in others.items():
        assert torch.equal(value, after[tensor]), tensor
    assert any(not torch.equal(value, after[tensor]) for tensor, value in before.items())
    source, written = (json.loads((folder / "config.json").read_text()) for folder in (model, export))
    assert written["architectures"] == source["architectures"]
    for file in modalities.PROCESSOR_FILES:
        assert (export / file).read_bytes() == (model / file).read_bytes()
    _, report = AutoModelForMultimodalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values())


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ci_keeps(["lora"], ["lora", "osft"]))
def test_adapters(adapter: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Adapters touch the language part alone, in whole runs and resumed ones; merged, all modalities are there again."""
    model = saved("gemma3")
    given = {"model_path": str(model), "data_path": str(rows(tmp_path)), "adapter": adapter, **SETTINGS}
    given |= {"lora_r": 4} if adapter == "lora" else {"unfreeze_rank_ratio": 0.5}
    whole = forge.sft(ckpt_output_dir=str(tmp_path / "whole"), **given)
    forge.sft(
        ckpt_output_dir=str(tmp_path / "parts"),
        **(given | {"max_steps": 1, "full_state_every_steps": 1, "keep_full_state": True}),
    )
    forge.sft(ckpt_output_dir=str(tmp_path / "parts"), **(given | {"full_state_every_steps": 1}))
    assert figures(tmp_path / "parts", "loss") == pytest.approx(figures(tmp_path / "whole", "loss"), rel=1e-6)
    export = whole.model_dir
    if adapter == "lora":
        assert all(".language_model." in name for name in load_file(export / "adapter_model.safetensors"))
        export = forge.export(tmp_path / "whole", tmp_path / "merged", merge=True)
        assert (export / modalities.PROCESSOR_FILES[0]).exists()
    others, after = other_tensors(model), load_file(export / "model.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in others.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name", "more"),
    # Under ZeRO-3 transformers draws weights of Gemma 3 before it reads them; LoRA's begin as on one rank all the same.
    [("fsdp2", "qwen3-vl", {}), pytest.param("zero3", "gemma3", {"adapter": "lora", "lora_r": 2}, marks=pytest.mark.lane)],
)
def test_two_ranks(strategy: str, name: str, more: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Divided it trains as on one rank, and what does not learn is written unchanged."""
    given = {"model_path": str(saved(name)), "data_path": str(rows(tmp_path)), **SETTINGS, **more}
    run_verb("sft", given | {"ckpt_output_dir": str(tmp_path / "one")})
    divided = given | {"ckpt_output_dir": str(tmp_path / "two"), "strategy": strategy}
    found = run_on_ranks(run_verb, 2, "sft", divided, joined=False)[0]
    assert figures(tmp_path / "two", "loss") == pytest.approx(figures(tmp_path / "one", "loss"), rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)
    if not more:
        after = load_file(Path(found["model_dir"]) / "model.safetensors")
        assert all(torch.equal(value, after[tensor]) for tensor, value in other_tensors(saved(name)).items())


@pytest.mark.slow
def test_rewards(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A reward model of a family that transformers has one of is trained, exported and loaded back; another is refused."""
    settings = settings_of("reward", saved("gemma3"), tmp_path) | {"max_steps": 1}
    result = run_verb("reward", settings | {"ckpt_output_dir": str(tmp_path / "run")})
    config = json.loads((Path(result["model_dir"]) / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForSequenceClassification"]
    other = settings | {"model_path": str(saved("qwen3-vl")), "ckpt_output_dir": str(tmp_path / "other")}
    with pytest.raises(forge_dist.ModelError, match="qwen3_vl gives no rewards"):
        run_verb("reward", other)
    assert not (tmp_path / "other").exists()


def test_an_image_is_refused_by_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A row with an image stops a verb that trains none, before a model is loaded; the error names file, row and field."""
    image = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "url": "cat.png"}]}
    answers = {"chosen": [{"role": "assistant", "content": "A cat."}], "rejected": [{"role": "assistant", "content": "A dog."}]}
    asked = [[{"role": "user", "content": text}] for text in ("one", "two")]
    data = write_rows(tmp_path / "images.jsonl", [{"prompt": prompt} | answers for prompt in [*asked, [image]]])
    with pytest.raises(
        forge_data.DataError,
        match=r"images\.jsonl:3: .*prompt\[0\]\.content\[1\] is an image, .*forge sft, osft, dpo, .* train images",
    ):
        forge.reward(model_path=str(saved("gemma3")), data_path=str(data), ckpt_output_dir=str(tmp_path / "run"), **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_generate(saved: Callable[[str], Path]) -> None:
    """`forge generate` answers with a model of several modalities."""
    assert isinstance(forge.generate(saved("qwen3-vl"), "what colour?", max_new_tokens=4), str)


def test_the_model_card_names_a_class_that_loads_it(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The code in the card loads the export, with every weight."""
    export = forge.export(saved("mistral3"), tmp_path / "export")
    card = (export / "README.md").read_text()
    (name,) = set(re.findall(r"AutoModel\w+", card))
    _, report = getattr(transformers, name).from_pretrained(export, output_loading_info=True)
    assert not any(report.values())
