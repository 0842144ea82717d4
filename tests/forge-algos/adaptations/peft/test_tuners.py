"""PEFT's tuners beside LoRA and ia3, each a row of the table: plain PEFT over single samples is the oracle."""

import peft
import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model

from forge_algos import SFT, AdapterError, AdapterSettings, OptimizerSettings, adapt, make_optimizer, schedule, train
from forge_algos.optimizers._muon import muon_matrices
from forge_algos.settings._adapter_table import ADAPTERS, AdapterKind

from ...oracle import distance, gradients, make, naive, pack, samples
from ...preferences import a_classifier
from ..base.test_targets import tiny

IDS = torch.arange(3, 12)[None]
# For each, settings that fit a tiny model.
TUNERS = {
    "oft": {"oft_block_size": 4},
    "hra": {"lora_r": 4},
    "loha": {"lora_r": 4, "lora_alpha": 6.0},
    "lokr": {"lora_r": 2, "lora_alpha": 6.0},
    "miss": {"lora_r": 5},
    "vera": {"vera_rank": 8},
    "randlora": {"lora_r": 4, "lora_alpha": 6.0},
    "fourierft": {"fourier_n_frequency": 20, "fourier_scaling": 60.0},
    "c3a": {"c3a_block_size": 8},
}
TRANSPOSED = ("vera", "randlora", "fourierft")
every = pytest.mark.parametrize("adapter", TUNERS)


def settings_of(adapter, **more):
    return AdapterSettings(adapter=adapter, **{**TUNERS[adapter], **more})


def theirs(adapter, model):
    """Return the same adapter by `get_peft_model`, with PEFT's names of arguments."""
    kind, settings = ADAPTERS[adapter], settings_of(adapter)
    arguments = {argument: getattr(settings, field) for argument, field in kind.arguments.items()}
    config = getattr(peft, kind.peft)(task_type="CAUSAL_LM", target_modules="all-linear", **arguments, **kind.options)
    return get_peft_model(model, config)


def both(adapter, *, moved=True):
    """Return the adapter by forge and by PEFT, of the same values; moved away from the first ones."""
    models = []
    for attach in (lambda model: adapt(model, settings_of(adapter)).model, lambda model: theirs(adapter, model)):
        torch.manual_seed(3)
        model = attach(make())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and moved:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        models.append(model)
    return models


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def steps(model, rows, number=1):
    settings = OptimizerSettings(learning_rate=0.02)
    optimizer = make_optimizer(model, settings)
    scheduler = schedule(optimizer, settings, num_steps=number)
    return list(train(model, [[pack(rows)]] * number, objective=SFT(), optimizer=optimizer, scheduler=scheduler))


def test_every_tuner_is_here():
    """Every row of the table that PEFT's tuners serve, beside LoRA's family and ia3, is tried."""
    others = {"LoraConfig", "IA3Config", "PrefixTuningConfig", "PromptTuningConfig", "AdaptionPromptConfig", ""}
    assert TUNERS.keys() == {name for name, kind in ADAPTERS.items() if kind.peft not in others and not kind.quantized}


@every
def test_it_begins_as_pefts_own_and_as_the_base(adapter):
    """Names and bits are those of `get_peft_model` at the same seed, in float32; the logits are the base's."""
    ours, plain = both(adapter, moved=False)
    expected = plain.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
    assert [name for name, p in ours.named_parameters() if p.requires_grad] == [
        name for name, p in plain.named_parameters() if p.requires_grad
    ]
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    torch.testing.assert_close(logits(ours), logits(make()), rtol=0, atol=1e-5)
    narrow = adapt(make().to(torch.bfloat16), settings_of(adapter)).model
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.float32}


@every
def test_a_packed_step_is_plain_pefts_over_single_samples(adapter):
    """The loss and every gradient of a packed row, against a naive loop over its samples."""
    ours, plain = both(adapter)
    rows = samples([6, 9, 4, 1, 7])
    found = {}
    optimizer = make_optimizer(ours, OptimizerSettings())
    optimizer.register_step_pre_hook(lambda *_: found.update(gradients(ours)))
    scheduler = schedule(optimizer, OptimizerSettings(), num_steps=1)
    (output,) = train(ours, [[pack(rows)]], objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0)
    total, count = naive(plain.train(), rows)
    (total / count).backward()
    assert output.loss == pytest.approx(total.item() / count, rel=1e-6)
    # Measured: at most 8e-7.
    assert distance(found, gradients(plain)) < 2e-6


@every
def test_it_learns_beside_a_frozen_base_and_merges(adapter, tmp_path):
    """Plain PEFT loads and merges the trained adapter; switched off it is the base, whose bits stay."""
    base = make()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    torch.manual_seed(3)
    model = adapt(base, settings_of(adapter)).model
    rows = samples([6, 9, 4], learned=1.0)
    losses = [output.loss for output in steps(model, rows, 10)]
    assert losses[-1] < losses[0] - 0.02
    after = {name.replace(".base_layer", ""): tensor for name, tensor in model.get_base_model().state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    expected = logits(model)
    model.save_pretrained(tmp_path)
    torch.manual_seed(8)  # what is random in it does not follow from torch's state
    plain = PeftModel.from_pretrained(make(), tmp_path)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-6)
    merged = plain.merge_and_unload(safe_merge=True)
    assert merged.state_dict().keys() == before.keys()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-5)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make()))


@pytest.mark.parametrize("adapter", ["vera", "randlora", "fourierft"])
def test_random_matrices_follow_from_no_state(adapter):
    """Ranks, resumed runs and readers draw the same: from a seed of their own, whatever torch's state."""
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = adapt(make(), settings_of(adapter)).model
        fixed = [tensor for name, tensor in model.named_buffers() if adapter in name]
        layer = model.get_base_model().model.layers[0].mlp.down_proj
        drawn.append(fixed or [layer.indices["default"]])
    assert drawn[0]
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@every
def test_gpt2s_transposed_layers(adapter, tmp_path):
    """Where PEFT puts it into Conv1D, it merges to what it computes; elsewhere it is refused by name."""
    config = tiny("GPT2").config
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.GPT2LMHeadModel(config))
    if adapter not in TRANSPOSED:
        with pytest.raises(AdapterError, match=f"of the class Conv1D, into which PEFT puts no {adapter}: use adapter=lora"):
            adapt(models[0], settings_of(adapter))
        return
    model = adapt(models[0], settings_of(adapter)).model
    steps(model, samples([6, 9, 4], learned=1.0), 2)
    model.save_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(models[1], tmp_path).merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"adapter": "oft"},
            r"oft_block_size=32 must divide the inputs of every target, and model\.layers\.0\.self_attn\.q_proj has 16 inputs: "
            "set oft_block_size=8, or name other target_modules",
        ),
        ({"adapter": "oft", "oft_block_size": 7}, "oft_block_size=7 must divide the inputs.*set oft_block_size=4"),
        ({"adapter": "c3a"}, "c3a_block_size=256 must divide the inputs and the outputs of every target.*set c3a_block_size=8"),
        ({"adapter": "hra", "lora_r": 3}, "lora_r=3: hra begins as its base.*needs an even number: set lora_r=4"),
        ({"adapter": "miss", "lora_r": 17}, "lora_r=17 is more than .*q_proj has inputs, 16: lower it"),
        ({"adapter": "fourierft"}, "fourier_n_frequency=1000 is more than .*q_proj has numbers, 256: lower it"),
    ],
)
def test_what_does_not_fit_a_layer_is_refused(settings, words):
    """Before PEFT rounds it or begins elsewhere: the setting, the layer and what would fit."""
    with pytest.raises(AdapterError, match=words):
        adapt(make(), AdapterSettings(**settings))


def test_loha_is_refused_where_weights_are_elsewhere():
    """ZeRO-3 leaves weights empty, and PEFT asks them for their shapes."""
    model = make()
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(0))
    with pytest.raises(AdapterError, match="adapter=loha: PEFT reads the shape of model.layers.1.mlp.up_proj.*strategy=fsdp2"):
        adapt(model, settings_of("loha"))


@every
def test_matrices_alone_decay_and_are_muons(adapter):
    """Scales, angles and reflections are no matrices; what begins at zero moves under Adafactor."""
    model = adapt(make(), settings_of(adapter)).model
    kind = ADAPTERS[adapter]
    named = {
        id(p): {part for part in name.split(".") if part.startswith(model.base_model.prefix)}.pop()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert {*kind.vectors, *kind.zero} <= {*named.values()}
    decay = make_optimizer(model, OptimizerSettings(weight_decay=0.1)).param_groups
    decaying = {named[id(p)] for group in decay if group["weight_decay"] for p in group["params"]}
    flat = {named[id(p)] for p in model.parameters() if p.requires_grad and p.dim() == 1}
    assert decaying == {*named.values()} - {*kind.vectors} - flat
    assert {named[id(p)] for p in muon_matrices(model)} <= decaying
    floors = make_optimizer(model, OptimizerSettings(optimizer="adafactor")).param_groups
    assert {named[id(p)] for group in floors if group["eps"][1] == 1 / 50 for p in group["params"]} == {*kind.zero}
    zeros = {named[id(p)] for p in model.parameters() if p.requires_grad and p.dim() > 1 and not p.any()}
    assert zeros == {*kind.zero}


@pytest.mark.parametrize("adapter", ["oft", "vera"])
def test_a_reward_models_score_is_trained_whole(adapter):
    """And so is what modules_to_save names."""
    model = adapt(a_classifier(), settings_of(adapter, modules_to_save=("embed_tokens",))).model
    assert {name for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name} == {
        "base_model.model.score.modules_to_save.default.weight",
        "base_model.model.model.embed_tokens.modules_to_save.default.weight",
    }


def test_what_peft_cannot_train_beside_them_is_refused():
    """Rows of new tokens, a tied embedding and head, and experts."""
    with pytest.raises(AdapterError, match="beside LoRA, and not beside oft"):
        adapt(make(), settings_of("oft"), new_tokens=[5])
    with pytest.raises(AdapterError, match="share one weight, and PEFT's loha would train only one"):
        adapt(make("llama-tied"), settings_of("loha", modules_to_save=("embed_tokens",)))


def test_another_tuner_is_one_row(monkeypatch):
    """PEFT's configuration class, and the settings that it reads."""
    row = AdapterKind(
        learning_rate=2e-4, peft="GraloraConfig", arguments={"r": "lora_r", "alpha": "lora_alpha"}, reads=("target_modules",)
    )
    monkeypatch.setitem(ADAPTERS, "gralora", row)
    model = adapt(make(), AdapterSettings(adapter="gralora", lora_r=4)).model
    assert torch.equal(logits(model), logits(make()))
    assert make_optimizer(model, OptimizerSettings()).param_groups[0]["lr"] == 2e-4


def test_a_tuner_is_described_with_its_rank():
    """The setting of the rank is the kind's own."""
    assert adapt(make(), settings_of("vera")).describe()[0].startswith("vera of rank 8 on 14 linear layers (attention: q_proj")
    assert adapt(make(), settings_of("oft")).describe()[0].startswith("oft on 14 linear layers")


@pytest.mark.parametrize(("rank", "full"), [(1, 0), (2, 8), (4, 14), (500, 14)])
def test_factors_that_no_rank_divides_are_named(rank, full):
    """LoKr's larger factor is one matrix from half of its longer side on, and the log says so."""
    adaptation = adapt(make(), settings_of("lokr", lora_r=rank))
    whole = sum(name.endswith("lokr_w2.default") for name, _ in adaptation.model.named_parameters())
    first, second, *_ = adaptation.describe()
    assert whole == full
    assert first.startswith(f"lokr of {'full rank' if full == 14 else f'rank {rank}'} on 14 linear layers")
    assert second.startswith(f"{full} of 14 layers train lokr_w2 as one full matrix: rank {rank} is half") == bool(full)
