"""Runs that go on from an adapter of every kind of PEFT's: in each verb, on ranks, killed, exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import forge
import forge_algos

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics, untimed, weights
from .test_adaptations import needs_bitsandbytes
from .test_adapter_path import WEIGHTS, going_on, held_out, log_of, peft_loss
from .verbs import run_verb, run_verb_killed, settings_of

KINDS: dict[str, dict[str, Any]] = {
    "vera": {"vera_rank": 8},
    "prefix": {"num_virtual_tokens": 3},
    "ia3": {},
    "prompt": {"num_virtual_tokens": 3},
    "adapter_prompt": {"num_virtual_tokens": 3},
    "oft": {"oft_block_size": 4},
    "qoft": {"oft_block_size": 4},
    "hra": {"lora_r": 4},
    "loha": {"lora_r": 4},
    "lokr": {"lora_r": 2},
    "miss": {"lora_r": 4},
    "randlora": {"lora_r": 4},
    "fourierft": {"fourier_n_frequency": 20},
    "c3a": {"c3a_block_size": 4},
}
IDS = torch.arange(5)[None]
TOKENS = ("prefix", "prompt", "adapter_prompt")
CASES = [pytest.param(kind, marks=needs_bitsandbytes, id=kind) if kind == "qoft" else kind for kind in KINDS]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows and reward functions."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def trained(model_dir: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Kind and verb → a short run of it, made once."""

    @cache
    def run(kind: str, verb: str = "sft") -> Path:
        where = tmp_path_factory.mktemp(kind) / "run"
        given = {"adapter": kind, "learning_rate": 1e-2, "lr_scheduler": "constant", **KINDS[kind], "max_steps": 2}
        run_verb(verb, {**settings_of(verb, model_dir, folder), **given, "ckpt_output_dir": str(where)}, str(folder))
        return where

    return run


@pytest.mark.parametrize("kind", ci_keeps(["vera", "prefix"], CASES))
def test_every_kind_goes_on_where_it_ended(
    kind: str, trained: Callable[..., Path], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """The first held-out loss is the last of the run before; halves end with the bits of a run in one piece."""
    first = trained(kind)
    whole = going_on("sft", model_dir, folder, first, tmp_path / "whole", adapter=kind, max_steps=3)
    one = Path(run_verb("sft", whole)["model_dir"])
    assert held_out(tmp_path / "whole")[0] == pytest.approx(held_out(first)[-1], rel=1e-5)
    assert held_out(tmp_path / "whole")[-1] != pytest.approx(held_out(first)[-1], rel=1e-5)
    halves = {**whole, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("sft", {**halves, "max_steps": 2})
    other = Path(run_verb("sft", halves)["model_dir"])
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", ci_keeps([], CASES))
def test_what_went_on_is_exported_and_answers(
    kind: str, trained: Callable[..., Path], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """`forge export` copies the adapter, --merge gives its logits as a plain model, and both answer alike."""
    run = tmp_path / "run"
    run_verb("sft", going_on("sft", model_dir, folder, trained(kind), run, adapter=kind))
    exported = forge.export(run, tmp_path / "exported")
    last = next(run.glob("hf_format/samples_*"))
    assert load_file(exported / WEIGHTS).keys() == load_file(last / WEIGHTS).keys()
    answer = forge.generate(run, "what colour has the plum?", max_new_tokens=6)
    assert answer == forge.generate(exported, "what colour has the plum?", max_new_tokens=6)
    if kind in TOKENS:
        with pytest.raises(Exception, match="cannot be merged") as caught:
            forge.export(run, tmp_path / "merged", merge=True)
        assert getattr(caught.value, "exit_status", None) == 2
        return
    merged = forge.export(run, tmp_path / "merged", merge=True, dtype="float32")
    if kind == "qoft":
        return  # merged into what the codes stand for, which the export compares
    from peft import AutoPeftModelForCausalLM

    assert answer == forge.generate(merged, "what colour has the plum?", max_new_tokens=6)
    beside: Any = AutoPeftModelForCausalLM.from_pretrained(last)
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        found, wanted = (model(IDS).logits for model in (plain, beside))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("kind", ci_keeps(["prefix"], CASES))
def test_the_reference_of_dpo_is_the_adapter_as_it_was(
    kind: str, trained: Callable[..., Path], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """Stored and live alike: no reward before the first step, and the same figures after it."""
    found = {}
    for reference in ("stored", "live"):
        run = tmp_path / reference
        run_verb("dpo", going_on("dpo", model_dir, folder, trained(kind), run, adapter=kind, reference=reference))
        found[reference] = held_out(run, "eval_margin")
        assert abs(found[reference][0]) < 1e-5
    assert found["live"] == pytest.approx(found["stored"], rel=1e-4, abs=1e-6)
    assert abs(found["live"][-1]) > 1e-5
    if kind not in ("prefix", "prompt"):
        run_verb(
            "dpo", going_on("dpo", model_dir, folder, trained(kind), tmp_path / "off", adapter=kind, reference="adapter_off")
        )
        assert abs(held_out(tmp_path / "off", "eval_margin")[0]) > 1e-5


VERBS = ("orpo", "kto", "embed", "classify", "reward", "grpo")
IN_VERBS = [(verb, kind) for verb in VERBS for kind in ("vera", "oft", "lokr", "ia3", "prefix")]
FROM_BEGINNING = {"kto": ("margin", "chosen_reward", "rejected_reward"), **dict.fromkeys(("grpo", "ppo", "rloo"), ("kl",))}
IN_VERBS.remove(("embed", "prefix"))  # which is refused
IN_VERBS += [(verb, kind) for verb in ("simpo", "pretrain", "distill", "sdft", "ppo", "rloo") for kind in ("vera", "prefix")]


@pytest.mark.parametrize(
    ("verb", "kind"),
    ci_keeps([], IN_VERBS),
)
def test_every_verb_goes_on(
    verb: str, kind: str, trained: Callable[..., Path], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """The first held-out figures are the last of a run of the same verb; a distance from the beginning begins at 0."""
    first, run = trained(kind, verb), tmp_path / "run"
    run_verb(verb, going_on(verb, model_dir, folder, first, run, adapter=kind), str(folder))
    before, after = (_held_out(each) for each in (first, run))
    from_beginning = FROM_BEGINNING.get(verb, ())
    assert all(abs(after[0][name]) < 1e-5 for name in from_beginning)
    # The reference of kto and the teacher of sdft are the adapter as it was.
    if verb not in ("kto", "sdft"):
        expected = {name: figure for name, figure in before[-1].items() if name not in from_beginning}
        assert expected == pytest.approx({name: after[0][name] for name in expected}, rel=1e-5)
    assert after[-1] != pytest.approx(after[0], rel=1e-5)


def _held_out(run: Path) -> list[dict[str, float]]:
    """Held-out figures of a run, at each measurement."""
    return [found for line in metrics(run) if (found := {n[5:]: v for n, v in line.items() if n.startswith("eval_")})]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    ci_keeps([], [(kind, strategy) for kind in ("vera", "oft", "prefix") for strategy in ("ddp", "fsdp2")]),
)
def test_on_two_ranks(
    kind: str, strategy: str, trained: Callable[..., Path], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """The losses are those of one process."""
    settings = going_on("sft", model_dir, folder, trained(kind), tmp_path / "both", adapter=kind, strategy=strategy)
    run_verb("sft", {**settings, "strategy": "single", "ckpt_output_dir": str(tmp_path / "alone")})
    run_on_ranks(run_verb, 2, "sft", settings, joined=False)
    one, other = (
        [line[name] for line in metrics(tmp_path / run) for name in ("loss", "eval_loss") if name in line]
        for run in ("alone", "both")
    )
    assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("kind", ci_keeps(["oft"], CASES))
def test_killed_it_ends_with_the_same_bits(
    kind: str, trained: Callable[..., Path], model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """kill -9 after the second of four steps, and the same command: the figures and weights of a run that nothing struck."""
    given = going_on("sft", model_dir, folder, trained(kind), tmp_path / "whole", adapter=kind, max_steps=4)
    run_on_ranks(run_verb, 1, "sft", given, joined=False)
    killed = {**given, "full_state_every_steps": 2, "ckpt_output_dir": str(tmp_path / "killed")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "sft", killed, str(folder), 2, joined=False)
    run_on_ranks(run_verb, 1, "sft", killed, joined=False)
    assert "resuming after step 2" in log_of(tmp_path / "killed")
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


OF_PEFT: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}},
    "olora": {"init_lora_weights": "olora"},
    "mica": {"init_lora_weights": "mica"},
    "lora_bias": {"lora_bias": True},
    "a head": {"target_modules": ["q_proj", "lm_head"]},
    "an embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "rows of tokens": {"trainable_token_indices": {"embed_tokens": [4, 7]}},
    "layers": {"layers_to_transform": [1], "exclude_modules": ["up_proj"]},
}


@pytest.mark.filterwarnings(
    "ignore:Setting .save_embedding_layers.:UserWarning",
    "ignore:.lora_bias=True. was passed:UserWarning",
    "ignore:.*have invalid shape:UserWarning",
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:Model has .tie_word_embeddings=True.:UserWarning",
)
@pytest.mark.parametrize("option", ci_keeps([], list(OF_PEFT)))
def test_a_lora_of_plain_peft(option: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The first loss is PEFT's; halves end with the bits of one piece, two ranks that divide the base with its losses."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    options = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **OF_PEFT[option]}
    torch.manual_seed(2)
    model = get_peft_model(base, LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "peft")
    whole = going_on(
        "sft", model_dir, folder, tmp_path / "peft", tmp_path / "whole", max_steps=3, weight_decay=0.1, kl_base=True
    )
    one = Path(run_verb("sft", whole)["model_dir"])
    first = next(line["loss"] for line in metrics(tmp_path / "whole") if "loss" in line)
    assert first == pytest.approx(peft_loss(model_dir, tmp_path / "peft", tmp_path / "whole"), rel=1e-5)
    assert abs(held_out(tmp_path / "whole", "eval_kl_base")[0]) < 1e-6
    assert "could not be compared" not in log_of(tmp_path / "whole")
    if option == "pissa":
        with pytest.raises(forge.SettingsError, match="adapter_path .*lora_fa=True: the one trains A") as caught:
            run_verb("sft", {**whole, "lora_fa": True, "ckpt_output_dir": str(tmp_path / "refused")})
        assert caught.value.exit_status == 2
        assert not (tmp_path / "refused").exists()
    halves = {**whole, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("sft", {**halves, "max_steps": 2})
    other = Path(run_verb("sft", halves)["model_dir"])
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
    ranks = {**whole, "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "ranks")}
    run_on_ranks(run_verb, 2, "sft", ranks, joined=False)
    losses = [
        [line[name] for line in metrics(tmp_path / run) for name in ("loss", "eval_loss") if name in line]
        for run in ("whole", "ranks")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # Plain PEFT reads what went on: the loss of the last held-out rows is a sum of its own.
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), one)
    # The embedding is the head too, and no layer here has a bias.
    if option not in ("a head", "an embedding", "lora_bias"):
        merged = AutoModelForCausalLM.from_pretrained(forge.export(one, tmp_path / "merged", merge=True, dtype="float32"))
        with torch.no_grad():
            torch.testing.assert_close(merged(IDS).logits, again(IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.lane
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_biases_of_the_base_train_too(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """As PEFT's `bias` says: resumed and on two ranks; refused where they are divided, rounded, or cannot be switched off."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    config = AutoConfig.from_pretrained(model_dir)
    config.attention_bias = True
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(base)
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", "bias": "all"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "peft")
    whole = going_on("sft", base, folder, tmp_path / "peft", tmp_path / "whole", max_steps=3, weight_decay=0.1, kl_base=True)
    one = Path(run_verb("sft", whole)["model_dir"])
    first = next(line["loss"] for line in metrics(tmp_path / "whole") if "loss" in line)
    assert first == pytest.approx(peft_loss(base, tmp_path / "peft", tmp_path / "whole"), rel=1e-5)
    assert abs(held_out(tmp_path / "whole", "eval_kl_base")[0]) < 1e-6
    before, after = (load_file(each / WEIGHTS) for each in (tmp_path / "peft", one))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("bias") and "k_proj" not in name)
    halves = {**whole, "ckpt_output_dir": str(tmp_path / "halves")}
    run_verb("sft", {**halves, "max_steps": 2})
    assert (Path(run_verb("sft", halves)["model_dir"]) / WEIGHTS).read_bytes() == (one / WEIGHTS).read_bytes()
    for strategy in ("ddp", "zero2"):
        ranks = {**whole, "strategy": strategy, "ckpt_output_dir": str(tmp_path / strategy)}
        run_on_ranks(run_verb, 2, "sft", ranks, joined=False)
        losses = [[line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in ("whole", strategy)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), one)
    merged = AutoModelForCausalLM.from_pretrained(forge.export(one, tmp_path / "merged", merge=True, dtype="float32"))
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, again(IDS).logits, rtol=0, atol=1e-4)
    refused = {**whole, "ckpt_output_dir": str(tmp_path / "refused")}
    with pytest.raises(Exception, match="biases of the base, which the strategy divides"):
        run_on_ranks(run_verb, 2, "sft", {**refused, "strategy": "fsdp2"}, joined=False)
    with pytest.raises(forge_algos.AdapterError, match="held in bfloat16 here.*set dtype=float32"):
        run_verb("sft", {**refused, "dtype": "bfloat16"})
    with pytest.raises(forge_algos.AdapterError, match="cannot be switched off: it trains biases"):
        run_verb("dpo", going_on("dpo", base, folder, one, tmp_path / "refused", reference="adapter_off"))
    assert not (tmp_path / "refused").exists()
