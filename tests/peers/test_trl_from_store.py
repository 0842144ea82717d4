"""The examples of docs/data.md run as they stand: TRL's trainer and a bare DataLoader train on a store's own masks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import forge_data

from .data_families import FAMILIES

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
torch = pytest.importorskip("torch", reason="TRL needs torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # what TRL warns about while a trainer is made; none of it is about the rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def example(mark: str) -> str:
    """The block of Python of the page that holds a mark."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if mark in code]
    return block


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A store of ragged conversations of several turns, its tokenizer and a tiny model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [
        {"messages": [{"role": role, "content": f"count to {n} " * (n + 1)} for role in ("user", "assistant") * (1 + n % 2)]}
        for n in range(10)
    ]
    store = forge_data.prepare(rows, tokenizer, tmp_path / "store", progress=False)
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **shape))
    return {"store": store, "tokenizer": tokenizer, "model": model}


def means(model: Any, store: Any, groups: list[list[int]]) -> list[float]:
    """Mean loss over the learned tokens of each group of samples by their weights, one unpadded sample at a time."""
    found = []
    for group in groups:
        total = count = 0.0
        for index in group:
            plain = {name: torch.from_numpy(values)[None] for name, values in store[index].as_dict().items()}
            weights = plain.get("weights", (plain["labels"] != -100).float())[0, 1:]
            with torch.no_grad():
                logits = model(input_ids=plain["input_ids"]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, plain["labels"][0, 1:], reduction="none")
            total, count = total + float((losses * weights).sum()), count + float(weights.sum())
        found.append(total / count)
    return found


def test_trl_trains_on_the_masks_of_the_store(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTTrainer keeps ids and labels as they are, and its loss is that of the store's samples."""
    monkeypatch.chdir(tmp_path)
    small = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "logging_steps": 1}
    config = {**small, "learning_rate": 1e-30, "num_train_epochs": 1, "save_strategy": "no"}
    names: dict[str, Any] = {
        **given,
        "SFTTrainer": trl.SFTTrainer,
        "SFTConfig": lambda **own: trl.SFTConfig(**{**own, **config, "train_sampling_strategy": "sequential"}),
    }
    exec(example("SFTTrainer("), names)
    trainer, store = names["trainer"], given["store"]
    kept = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]
    assert kept == [{"input_ids": each.input_ids.tolist(), "labels": each.labels.tolist()} for each in store]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    groups = [list(range(first, min(first + 4, 10))) for first in (0, 4, 8)]
    assert losses == pytest.approx(means(given["model"], store, groups), rel=1e-3)


class Losses(dict[str, Any]):
    """Names of a program; notes every value of `loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name == "loss":
            self.seen.append(float(value))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_bare_data_loader(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    """The loop of the page sees every sample once, padded, with the loss of the unpadded ones, by their weights if any."""
    import numpy as np
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, default_collate

    store, model, seen, losses = given["store"], given["model"], [], Losses()
    if weighted:
        rows = [{"input_ids": [5, 6, 7 + n], "labels": [-100, 6, 7 + n], "weights": [0, 0.5, n + 1.0]} for n in range(8)]
        rows += [{"input_ids": [9, 8, 7, 6], "labels": [-100, 8, 7, 6]}]
        store = forge_data.prepare(rows, given["tokenizer"], tmp_path / "weighted", progress=False)
    forward = model.forward

    def noting(**batch: Any) -> Any:
        seen.append(batch)
        return forward(**batch)

    monkeypatch.setattr(model, "forward", noting)
    own = {"store": store, "np": np, "torch": torch, "DataLoader": DataLoader, "cross_entropy": cross_entropy}
    exec(example("DataLoader(store"), {**given, **own}, losses)
    monkeypatch.setattr(model, "forward", forward)
    places = {tuple(each.input_ids.tolist()): index for index, each in enumerate(store)}
    groups = [
        [
            places[tuple(ids[mask.bool()].tolist())]
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        for batch in seen
    ]
    assert sorted(index for group in groups for index in group) == list(range(len(store)))
    assert losses.seen == pytest.approx(means(model, store, groups), rel=1e-5)
    same = [store[0].as_dict(), store[0].as_dict()]
    assert default_collate(same)["labels"].tolist() == [store[0].labels.tolist()] * 2


def test_trl_knows_no_weights() -> None:
    """Its collator drops the column, as the page says; the day that it does not, the page changes."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    row = {"input_ids": [5, 6], "labels": [-100, 6], "weights": [0.0, 2.0]}
    assert "weights" not in DataCollatorForLanguageModeling(pad_token_id=0)([row, row])
