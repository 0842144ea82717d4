"""What PEFT's LoraConfig can hold: adapters that plain PEFT wrote go on as PEFT's own trainable model of them."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from forge_algos import SFT, AdapterError, AdapterSettings, OptimizerSettings, adapt, make_optimizer, schedule, train
from forge_algos.adaptations import switched_off

from ....lanes import ci_keeps
from ...experts import mixture
from ...oracle import SIZES, distance, gradients, make, naive, pack, samples
from .test_stored_kinds import FILE, IDS, moved

UNTIED, TIED, MIXTURE, BIASES = "llama-untied", "llama-tied", "mixtral", "llama with biases"
# Each with the base that it is written beside.
OPTIONS = {
    "rank_pattern": (UNTIED, {"rank_pattern": {r"^model\.layers\.0\..*down_proj": 3}}),
    "alpha_pattern": (UNTIED, {"alpha_pattern": {"q_proj": 2}}),
    "layers_to_transform": (UNTIED, {"layers_to_transform": 0, "layers_pattern": "layers"}),
    "exclude_modules": (UNTIED, {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"}),
    "modules_to_save": (UNTIED, {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "modules_to_save of a tied embedding": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "ensure_weight_tying": (TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "trainable_token_indices": (UNTIED, {"trainable_token_indices": {"embed_tokens": [4, 7], "lm_head": [4, 7]}}),
    "trainable_token_indices of a tied embedding": (TIED, {"trainable_token_indices": [7, 4]}),
    "use_dora and use_rslora": (UNTIED, {"use_dora": True, "use_rslora": True}),
    "a head": (UNTIED, {"target_modules": ["q_proj", "lm_head"]}),
    "an embedding": (UNTIED, {"target_modules": ["q_proj", "embed_tokens"]}),
    "an embedding that is the head": (
        TIED,
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "lora_bias": (UNTIED, {"lora_bias": True}),
    "bias=all": (BIASES, {"bias": "all"}),
    "bias=lora_only": (BIASES, {"bias": "lora_only"}),
    "bias=all without any": (UNTIED, {"bias": "all"}),
    "init_lora_weights=False": (UNTIED, {"init_lora_weights": False}),
    "mica": (UNTIED, {"init_lora_weights": "mica"}),
    "pissa": (UNTIED, {"init_lora_weights": "pissa"}),
    "pissa with patterns": (
        UNTIED,
        {"init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    ),
    "pissa with use_rslora": (UNTIED, {"init_lora_weights": "pissa", "use_rslora": True}),
    "pissa with use_dora": (UNTIED, {"init_lora_weights": "pissa", "use_dora": True}),
    "olora": (UNTIED, {"init_lora_weights": "olora"}),
    "target_parameters": (MIXTURE, {"target_parameters": ["experts.gate_up_proj"]}),
}
IN_CI = [
    "exclude_modules",
    "a head",
    "an embedding that is the head",
    "lora_bias",
    "bias=all",
    "mica",
    "pissa with patterns",
    "olora",
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*have invalid shape:UserWarning"),  # PEFT 0.21 takes a bias of B for a torn matrix
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
]


def base_of(architecture):
    if architecture == MIXTURE:
        return mixture(MIXTURE, router_aux_loss_coef=0.0)
    if architecture == BIASES:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)).train()
    return make(architecture)


def written(folder, architecture, **more):
    """Write PEFT's adapter with values that are not its first; return its logits."""
    targets = ["q_proj", "down_proj" if architecture != MIXTURE else "v_proj"]
    config = LoraConfig(**{"r": 4, "lora_alpha": 7, "target_modules": targets, "task_type": "CAUSAL_LM", **more})
    model = moved(get_peft_model(base_of(architecture), config))
    model.save_pretrained(folder)
    return logits(model)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def going_on(folder, architecture, model=None, **more):
    kinds = [kind for kind in ("dora", "rslora") if json.loads((folder / "adapter_config.json").read_text())[f"use_{kind}"]]
    model = base_of(architecture) if model is None else model
    return adapt(model, AdapterSettings(adapter=[*kinds, "lora"][0], adapter_path=str(folder), **more))


def first_halves(found, expected):
    """Cut gradients of what has twice the rank to those of PEFT's form; the second halves have none."""
    cut = {}
    for name, gradient in found.items():
        dim = 0 if "lora_A" in name else 1
        size = expected[name].shape[dim] if gradient.ndim > dim else 0
        doubled = gradient.shape != expected[name].shape
        assert not doubled or not gradient.narrow(dim, size, size).any()
        cut[name] = gradient.narrow(dim, 0, size) if doubled else gradient
    return cut


@pytest.mark.parametrize("option", ci_keeps(IN_CI, list(OPTIONS)))
def test_what_peft_trains_is_trained(option, tmp_path):
    """Logits, trained parameters, a packed step's loss and gradients are PEFT's; plain PEFT reads what went on."""
    architecture, given = OPTIONS[option]
    expected = written(tmp_path / "first", architecture, **given)
    adaptation = going_on(tmp_path / "first", architecture)
    ours, plainly = adaptation.model, PeftModel.from_pretrained(base_of(architecture), tmp_path / "first", is_trainable=True)
    size = expected.abs().max().item()
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-6 * size)
    trained = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (ours, plainly)]
    assert trained[0] == trained[1]
    ours.save_pretrained(tmp_path / "second", save_embedding_layers=False)
    again = PeftModel.from_pretrained(base_of(architecture), tmp_path / "second")
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-6 * size)

    rows, found = samples([6, 9, 4, 1, 7]), {}
    optimizer = make_optimizer(ours, OptimizerSettings(weight_decay=0.1))
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients(ours)))
    scheduler = schedule(optimizer, OptimizerSettings(), num_steps=1)
    steps = train(
        ours.train(), [[pack(rows)]], objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0,
        adaptation=adaptation,
    )  # fmt: skip
    (output,) = steps
    total, count = naive(plainly.train(), rows)
    (total / count).backward()
    assert output.loss == pytest.approx(total.item() / count, rel=1e-6)
    theirs = gradients(plainly)
    assert distance(first_halves(found, theirs), theirs) < 5e-6


def test_the_base_in_the_file_must_be_the_models(tmp_path):
    """PEFT writes the weight of a head beside its factors, in the dtype that it trained in."""
    written(tmp_path, UNTIED, target_modules=["lm_head"])
    name = "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(tmp_path / FILE)
    save_file({**tensors, name: tensors[name].bfloat16()}, tmp_path / FILE, metadata={"format": "pt"})
    going_on(tmp_path, UNTIED)
    save_file({**tensors, name: tensors[name] * 1.1}, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="it holds the weight of lm_head too, which is another one than in model_path"):
        going_on(tmp_path, UNTIED)


@pytest.mark.parametrize("architecture", [UNTIED, TIED])
def test_embeddings_that_were_written_beside_an_adapter(architecture, tmp_path):
    """PEFT's save_embedding_layers, which it chooses itself where the vocabulary grew: the model's are compared, and stay."""
    model = moved(get_peft_model(base_of(architecture), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")))
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    tensors, name = load_file(tmp_path / FILE), "base_model.model.model.embed_tokens.weight"
    assert name in tensors
    torch.testing.assert_close(logits(going_on(tmp_path, architecture).model), logits(model), rtol=0, atol=0)
    save_file({**tensors, name: tensors[name] * 1.1}, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=r"it holds the weight of model.embed_tokens too, which is another one"):
        going_on(tmp_path, architecture)
    save_file({**tensors, name: torch.cat([tensors[name]] * 2)}, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=r"model.embed_tokens too, with 122 rows, and model_path has 61: the vocabulary"):
        going_on(tmp_path, architecture)


def test_biases_of_the_base_cannot_be_switched_off(tmp_path):
    """Nor are they trained in 16 bits. Where the base has none, `bias` says nothing."""
    written(tmp_path, BIASES, bias="lora_only")
    with pytest.raises(AdapterError, match="held in bfloat16 here"):
        going_on(tmp_path, BIASES, base_of(BIASES).bfloat16())
    with (
        pytest.raises(AdapterError, match="cannot be switched off: it trains biases of the base"),
        switched_off(going_on(tmp_path, BIASES).model),
    ):
        pass
    written(tmp_path, UNTIED, bias="lora_only")
    with switched_off(going_on(tmp_path, UNTIED).model):
        pass


def test_what_is_given_of_a_subtracted_one(tmp_path):
    """Settings are compared with its own rank and scale, and lora_fa would keep what it trains."""
    written(tmp_path, UNTIED, init_lora_weights="pissa")
    going_on(tmp_path, UNTIED, lora_r=4, lora_alpha=7.0, rank_pattern=["q_proj=4"], alpha_pattern=["q_proj=7"])
    going_on(tmp_path, UNTIED, init_lora_weights="pissa")
    with pytest.raises(AdapterError, match="init_lora_weights=olora: .* has init_lora_weights=pissa"):
        going_on(tmp_path, UNTIED, init_lora_weights="olora")
    with pytest.raises(AdapterError, match="rank_pattern"):
        going_on(tmp_path, UNTIED, rank_pattern=["q_proj=8"])
    with pytest.raises(AdapterError, match="lora_fa=True: the one trains A, the other keeps it"):
        going_on(tmp_path, UNTIED, lora_fa=True)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "belongs beside a base that init_lora_weights=pissa_niter_4 changed"),
        (
            {"init_lora_weights": "pissa", "target_modules": ["q_proj", "embed_tokens"]},
            "embed_tokens, which is no linear layer",
        ),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens=\[5, 6\] .* is not trained here"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication=.* is not trained here"),
    ],
)
def test_what_is_refused(given, match, tmp_path):
    """What follows from a draw that nobody makes again, and options of PEFT that packed rows cannot hold."""
    written(tmp_path, UNTIED, **given)
    with pytest.raises(AdapterError, match=match):
        going_on(tmp_path, UNTIED)
