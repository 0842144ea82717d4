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
    """Mean loss over the learned tokens of each group of samples, one unpadded sample at a time."""
    found = []
    for group in groups:
        total = 0.0
        for index in group:
            plain = {name: torch.from_numpy(values)[None] for name, values in store[index].as_dict().items()}
            with torch.no_grad():
                total += float(model(**plain).loss) * store[index].loss_count
        found.append(total / sum(store[index].loss_count for index in group))
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


def test_a_bare_data_loader(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of the page sees every sample once, padded, with the loss of the unpadded ones."""
    import numpy as np
    from torch.utils.data import DataLoader, default_collate

    store, model, seen = given["store"], given["model"], []
    forward = model.forward

    def noting(**batch: Any) -> Any:
        seen.append(batch)
        return forward(**batch)

    monkeypatch.setattr(model, "forward", noting)
    exec(example("DataLoader(store"), {**given, "np": np, "torch": torch, "DataLoader": DataLoader})
    monkeypatch.setattr(model, "forward", forward)
    rows = [
        tuple(ids[mask.bool()].tolist())
        for batch in seen
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert sorted(rows) == sorted(tuple(each.input_ids.tolist()) for each in store)
    places = {tuple(each.input_ids.tolist()): index for index, each in enumerate(store)}
    for batch in seen:
        indices = [
            places[tuple(ids[mask.bool()].tolist())]
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        with torch.no_grad():
            assert float(model(**batch).loss) == pytest.approx(means(model, store, [indices])[0], rel=1e-5)
    same = [store[0].as_dict(), store[0].as_dict()]
    assert default_collate(same)["labels"].tolist() == [store[0].labels.tolist()] * 2
