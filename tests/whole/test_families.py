"""A dozen structurally different families of those that `hatch run families` checks: right in CI too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from ..lanes import ci_keeps, quick_keeps
from ..ranks import run_on_ranks
from .repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

sys.path.insert(0, str(ROOT / "tools"))

import family_check
import family_configs

PACKED = {
    "lfm2": "a convolution that reads where documents begin",
    "llama": "the common shape",
    "gpt2": "learned positions, Conv1D",
    "gemma2": "soft-capped scores",
    "gemma3_text": "sliding windows, two rotary bases",
    "gpt_oss": "attention sinks",
    "granitemoehybrid": "a state in some layers, experts",
    "qwen3_5_text": "a gated delta rule in some layers",
    "qwen3_moe": "experts",
    "deepseek_v3": "latent attention, grouped experts",
    "deepseek_v32": "keys selected by an index",
    "modernbert-decoder": "a head called decoder",
}
ALONE = {
    "bloom": "ALiBi over the whole row",
    "mamba2": "a state",
    "prophetnet": "a decoder with two streams",
    "roberta": "positions behind the padding token's",
    "rwkv": "a recurrence, weights that evaluation halves",
}
IN_CI = ["deepseek_v32", "gemma3_text", "gpt_oss", "granitemoehybrid", "modernbert-decoder", "prophetnet", "roberta", "rwkv"]
"""Of each kind of layer one; the others are in other files of CI too, or have nothing that these have not."""
QUICK = ["gemma3_text", "granitemoehybrid", "roberta"]
"""Packed; a state, and packed; alone."""


@pytest.mark.parametrize("model_type", quick_keeps(QUICK, ci_keeps(IN_CI, [*PACKED, *ALONE])))
def test_loss_and_gradients_are_those_of_plain_transformers(model_type: str, tmp_path: Path) -> None:
    """A step's loss and each gradient equal those of one unpadded document at a time, packed where that is exact."""
    found = family_check.check(model_type, tmp_path, only=("built", "numbers"))
    assert found["built"]["ok"], found
    assert found["numbers"]["ok"], found["numbers"]["says"]
    assert found["numbers"]["packed"] == (model_type in PACKED), found["numbers"]["why"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ci_keeps([], ["deepseek_v3", "mamba2"]))
def test_runs_are_exported_resumed_and_adapted(model_type: str, tmp_path: Path) -> None:
    """What was trained is read back, a resumed run goes on as the whole one, and adapters find targets."""
    found = family_check.check(model_type, tmp_path, only=("built", "export", "resumed", "lora", "osft"))
    for name, answer in found.items():
        assert answer["ok"], (name, answer["says"])
    assert int(found["lora"]["cell"]) > 0
    assert int(found["osft"]["cell"]) > 0


def divided(folder: Path, where: Path) -> None:
    """Be one of the ranks over which OSFT divides a model by fsdp2."""
    family_check.run(folder, where, strategy="fsdp2", **family_check.ADAPTERS["osft"])


@pytest.mark.slow
@pytest.mark.lane
@pytest.mark.parametrize("model_type", ["mamba2", "zamba", "kimi_linear", "gpt_oss", "deepseek_v4"])
def test_osft_over_two_ranks_is_that_of_one_process(model_type: str, tmp_path: Path) -> None:
    """A model whose documents run alone is divided with the directions that it protects: the same losses."""
    (folder := tmp_path / "model").mkdir()
    family_check.save(model_type, folder)
    whole = family_check.run(folder, tmp_path / "whole", **family_check.ADAPTERS["osft"])
    run_on_ranks(divided, 2, folder, tmp_path / "divided", joined=False, timeout=600)
    assert family_check.equal(family_check.losses(tmp_path / "divided"), whole, family_check.CLOSE["ranks"])["ok"]


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    """What the comparison looks for it finds: packed rows whose positions go on over a document's end."""
    family_check.save("gpt2", tmp_path)
    plain = family_check.plain_step(tmp_path, family_check.torch.device("cpu"))
    loaded = family_check.load(tmp_path)
    assert family_check.compare(family_check.step(loaded.model), plain)["ok"]
    loaded.model.register_forward_pre_hook(_positions_go_on, with_kwargs=True)
    assert not family_check.compare(family_check.step(loaded.model), plain)["ok"]


def _positions_go_on(_module, args, kwargs):
    positions = kwargs["position_ids"]
    return args, kwargs | {"position_ids": positions * 0 + positions.new_tensor(range(positions.shape[-1]))}


def test_a_config_has_a_layer_of_each_kind() -> None:
    """Tiny models are of the structure that their class has by default."""
    assert family_configs.tiny_config("gemma3_text").layer_types == ["sliding_attention", "full_attention"]
    assert family_configs.tiny_config("qwen3_5_text").layer_types == ["linear_attention", "full_attention"]
    assert family_configs.tiny_config("falcon").hidden_size == 32
