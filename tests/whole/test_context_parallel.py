"""Ranks that share packed rows (cp_size): windows, sinks and capped scores; what is refused before data are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forge
import forge_data

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import sft
from .three_steps import SETTINGS, figures, rows

if TYPE_CHECKING:
    from collections.abc import Callable

CP: dict[str, Any] = {"strategy": "fsdp2", "cp_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ci_keeps(
        ["gpt-oss: sinks, and a mask made without positions"],
        ["mistral-window", "gemma2: capped scores", "gpt-oss: sinks, and a mask made without positions"],
    ),
)
def test_windows_sinks_and_capped_scores(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses and gradient norms of two ranks that share each row are those of one process, and the export is proved."""
    given = {"model_path": str(saved(name)), "data_path": str(rows(tmp_path)), **SETTINGS, "attention": "documents"}
    for where, ranks, more in (("one", 1, {}), ("two", 2, {**CP, "max_tokens_per_gpu": 32})):
        run_on_ranks(sft, ranks, {**given, **more, "ckpt_output_dir": str(tmp_path / where)}, joined=False)
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "one"), rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)
    assert figures(tmp_path / "two", "tokens") == figures(tmp_path / "one", "tokens")
    log = (tmp_path / "two" / "log.txt").read_text()
    assert "loaded back" in log
    assert "cp_size: 2" in (tmp_path / "two" / "config.yaml").read_text()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row may be read."""

    def prepare(*_: Any, **__: Any) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(forge_data, "prepare", prepare)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("name", "said"),
    ci_keeps(
        [
            ("lfm2: a convolution", r"model.layers.0.conv \(Lfm2ShortConv\) carries a state from token to token"),
            ("bloom: distances over the whole row", "does not keep packed documents apart"),
            ("llama4: chunked attention", "its layers attend in chunks"),
        ],
        [
            ("mamba2: a state", "Mamba2ForCausalLM"),
            ("lfm2: a convolution", r"model.layers.0.conv \(Lfm2ShortConv\) carries a state from token to token"),
            ("qwen3.5: a state, and an error of transformers", r"linear_attn \(Qwen3_5GatedDeltaNet\) carries a state"),
            ("bloom: distances over the whole row", "does not keep packed documents apart"),
            ("llama4: chunked attention", "its layers attend in chunks"),
        ],
    ),
)
def test_models_that_cannot_are_refused_by_name(name: str, said: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Layers with a state, or a mask that only another attention has: the message names them, before a row is read."""
    given = {"model_path": str(saved(name)), "data_path": str(rows(tmp_path)), "cp_size": 2, **SETTINGS}
    with pytest.raises(
        Exception, match=f"cp_size=2 cuts packed rows over ranks, which this model does not allow: .*{said}"
    ) as raised:
        forge.dry_run(forge.sft, **given, nproc_per_node=2, ckpt_output_dir=tmp_path / "run")
    assert raised.value.exit_status == 2  # type: ignore[attr-defined]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"packing": "off"}, "with packing=off it cannot: a sample that runs alone is in no packed row"),
        ({"attention": "sdpa"}, "with attention=sdpa it cannot: only attention=documents gathers"),
        ({"adapter": "prefix"}, "with adapter=prefix it cannot: its virtual tokens stand before each sample"),
        ({"neftune_alpha": 5.0}, "with neftune_alpha=5.0 it cannot"),
        ({"adapter": "osft", "osft_rank": "adaptive"}, "with osft_rank=adaptive it cannot"),
        ({"strategy": "zero3"}, "cp_size=2 has no effect with strategy=zero3"),
        ({"cp_size": 0}, "cp_size must be 1 or more"),
        ({"cp_size": True}, "cp_size must be a whole number"),
        ({"backend": "trl"}, "cp_size"),
        ({}, "cp_size=2 has no effect with one rank"),
    ],
    ids=str,
)
def test_settings_that_contradict_it(settings: dict[str, Any], said: str, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """One clear error before anything is written."""
    given = {"model_path": str(model_dir), "data_path": str(chats), "max_steps": 1, "cp_size": 2, **settings}
    with pytest.raises(Exception, match=said) as raised:
        forge.sft(**given, ckpt_output_dir=str(tmp_path / "run"))
    assert getattr(raised.value, "exit_status", 2) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp_size": 4}, "tp_size=4 does not divide its 2 num_key_value_heads"),
        ({"ep_size": 2}, "no plan by which experts of LlamaForCausalLM are divided"),
        ({"tp_size": 2, "adapter": "osft"}, "tp_size=2 divides the matrices whose singular vectors adapter=osft keeps"),
        ({"tp_size": 2, "adapter": "lora"}, "tp_size=2 divides the layers that an adapter would be put into"),
        ({"tp_size": 2, "optimizer": "muon"}, "which muon needs whole"),
        ({"tp_size": 2, "backend": "trl"}, "tp_size"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_divided(
    settings: dict[str, Any], said: str, model_dir: Path, chats: Path, tmp_path: Path
) -> None:
    """tp_size and ep_size: one clear error before anything is read or written."""
    given = {"model_path": str(model_dir), "data_path": str(chats), "max_steps": 1, "nproc_per_node": 4, **settings}
    with pytest.raises(Exception, match=said) as raised:
        forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run")
    assert getattr(raised.value, "exit_status", 2) == 2
    assert not (tmp_path / "run").exists()
