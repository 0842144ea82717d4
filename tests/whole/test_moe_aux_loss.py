"""The auxiliary loss of a mixture of experts in whole runs: over the step, over ranks, beside other objectives."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import forge
import forge_data
import forge_packing

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import tiny
from .conftest import write_rows
from .three_steps import figures
from .verbs import run_verb, settings_of

COEFFICIENT = 0.5
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "effective_batch_size": 6,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "eps": 1e-3,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A directory of a tiny mixture of experts with uneven routers, and a tokenizer."""
    directory = tmp_path_factory.mktemp("mixture")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = Qwen3MoeConfig(
        vocab_size=max(len(tokenizer), tiny.VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        router_aux_loss_coef=COEFFICIENT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(20)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def rows(folder: Path) -> Path:
    """Documents of unequal lengths, as rows of ids and labels."""
    samples = [tiny.sample(length, length) for length in (50, 4, 7, 13, 9, 25, 11, 6, 45, 8, 12, 10)]
    return write_rows(folder / "rows.jsonl", [{"input_ids": s.input_ids, "labels": s.labels} for s in samples])


def first_step(run: Path, model: Path) -> tuple[float, float]:
    """Negative log-likelihood and auxiliary loss of the first step, one document a forward in plain transformers."""
    plain = tiny.plain(str(model))
    store = forge_data.TokenStore.open(run / "data" / "train")
    chosen = forge_packing.BatchPlan.load(run / "plan" / "plan.npz").samples(0).tolist()
    nll, count, routed = 0.0, 0, []
    for row in chosen:
        ids, labels = (torch.from_numpy(array.astype("int64"))[None] for array in (store[row].input_ids, store[row].labels))
        with torch.no_grad():
            out = plain(input_ids=ids, output_router_logits=True, use_cache=False)
        nll += float(torch.nn.functional.cross_entropy(out.logits[0, :-1], labels[0, 1:], reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
        routed.append(out.router_logits)
    layers = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
    balance = import_module(type(plain).__module__).load_balancing_loss_func
    return nll / count, float(balance(layers, plain.num_experts, plain.num_experts_per_tok))


@pytest.mark.slow
def test_the_loss_of_the_routers_is_on_and_does_not_depend_on_the_cut(mixture: Path, tmp_path: Path) -> None:
    """Many micro-batches or one, packed or alone: the same losses, the first of which is transformers' own."""
    given = {"model_path": str(mixture), "data_path": str(rows(tmp_path)), **SETTINGS}
    runs = {
        "one": {"max_tokens_per_gpu": 512},
        "many": {"max_tokens_per_gpu": 64},
        "alone": {"max_tokens_per_gpu": 64, "packing": "off"},
    }
    for name, more in runs.items():
        forge.sft(**given, **more, ckpt_output_dir=str(tmp_path / name))
    nll, aux = first_step(tmp_path / "one", mixture)
    assert figures(tmp_path / "one")[0] == pytest.approx(nll + COEFFICIENT * aux, rel=1e-5)
    assert figures(tmp_path / "one", "aux_loss")[0] == pytest.approx(aux, rel=1e-5)
    for name in ("many", "alone"):
        assert figures(tmp_path / name) == pytest.approx(figures(tmp_path / "one"), rel=1e-5)
        assert figures(tmp_path / name, "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)
        assert figures(tmp_path / name, "expert_load") == [
            [pytest.approx(layer, abs=1e-5) for layer in step] for step in figures(tmp_path / "one", "expert_load")
        ]
    log = {name: (tmp_path / name / "log.txt").read_text() for name in runs}
    assert "moe_aux_loss: global: 2 layers of 4 experts, 2 a token; router_aux_loss_coef 0.5" in log["one"]
    assert "one more forward" not in log["one"]
    assert "3 of the first 3 steps have several micro-batches a rank, each of which takes one more forward" in log["many"]


@pytest.mark.slow
def test_a_resumed_run_repeats_it(mixture: Path, tmp_path: Path) -> None:
    """A run that was stopped has the losses of one that was not."""
    given = {"model_path": str(mixture), "data_path": str(rows(tmp_path)), "max_tokens_per_gpu": 64, **SETTINGS}
    given |= {"full_state_every_steps": 1, "keep_full_state": True}
    forge.sft(**given, ckpt_output_dir=str(tmp_path / "whole"))
    forge.sft(**(given | {"max_steps": 1}), ckpt_output_dir=str(tmp_path / "parts"))
    forge.sft(**given, ckpt_output_dir=str(tmp_path / "parts"))
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


@pytest.mark.lane
def test_a_preference_loss_has_it_too(mixture: Path, tmp_path: Path) -> None:
    """The first DPO loss is log 2 and the auxiliary loss, with LoRA whose reference is the model without it."""
    given = settings_of("dpo", mixture, tmp_path) | {"adapter": "lora", "lora_r": 4, "target_modules": ("q_proj", "v_proj")}
    forge.dpo(**given, ckpt_output_dir=str(tmp_path / "run"))
    expected = math.log(2) + COEFFICIENT * figures(tmp_path / "run", "aux_loss")[0]
    assert figures(tmp_path / "run")[0] == pytest.approx(expected, rel=1e-5)


def test_trl_without_routers_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """A setting without an effect is refused by name before the run has a directory."""
    with pytest.raises(forge.SettingsError, match=r"moe_aux_loss=trl has no effect: .*router_aux_loss_coef.*Leave it out"):
        forge.sft(
            model_path=str(model_dir),
            data_path=str(rows(tmp_path)),
            ckpt_output_dir=str(tmp_path / "run"),
            moe_aux_loss="trl",
            **SETTINGS,
        )
    assert not (tmp_path / "run").exists()


EP: dict[str, Any] = {"strategy": "fsdp2", "ep_size": 2}
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 4, "target_modules": ("q_proj", "v_proj")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("division", "adapter"),
    ci_keeps(
        [(EP, {})],
        [
            ({"strategy": "ddp"}, {}),
            ({"strategy": "fsdp2"}, {}),
            ({"strategy": "fsdp2", "cp_size": 2}, {}),
            (EP, {}),
            (EP, LORA),
        ],
    ),
    ids=str,
)
def test_two_ranks_are_one_process(division: dict[str, Any], adapter: dict[str, Any], mixture: Path, tmp_path: Path) -> None:
    """The totals of a step are those of all ranks, and the gradient norms too."""
    given = {"model_path": str(mixture), "data_path": str(rows(tmp_path)), "max_tokens_per_gpu": 64, **SETTINGS, **adapter}
    run_verb("sft", given | {"ckpt_output_dir": str(tmp_path / "one")})
    divided = given | {"ckpt_output_dir": str(tmp_path / "two"), **division}
    run_on_ranks(run_verb, 2, "sft", divided, str(tmp_path), joined=False)
    for name in ("loss", "aux_loss"):
        assert figures(tmp_path / "two", name) == pytest.approx(figures(tmp_path / "one", name), rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(tmp_path / "one", "grad_norm"), rel=1e-4)
