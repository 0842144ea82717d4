"""Adapters through PEFT: initial values, targets, the frozen base, export to plain PEFT."""

import json
import math
from types import SimpleNamespace

import attrs
import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import distributed
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_algos import SFT, AdapterError, AdapterSettings, OptimizerSettings, adapt, make_optimizer, schedule, train

from ...oracle import VOCAB, gradients, make, pack, samples
from ...preferences import a_classifier
from ..base.test_targets import tiny

IDS = torch.arange(3, 12)[None]
LORA = AdapterSettings(adapter="lora", lora_r=3, lora_alpha=5.0)
FAMILY = {
    "lora": LORA,
    "dora": AdapterSettings(adapter="dora", lora_r=3, lora_alpha=5.0),
    "rslora": AdapterSettings(adapter="rslora", lora_r=3, lora_alpha=5.0),
    "ia3": AdapterSettings(adapter="ia3"),
}
every = pytest.mark.parametrize("adapter", FAMILY)


def targets_of(model):
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A" in name}


def trained(model, *, rate=0.05, steps=15):
    """Return the losses of some steps on one row."""
    settings = OptimizerSettings(learning_rate=rate)
    optimizer = make_optimizer(model, settings)
    row = pack(samples([6, 9, 4], learned=1.0))
    outputs = train(
        model, [[row]] * steps, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, settings, num_steps=steps)
    )
    return [output.loss for output in outputs]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def saved(model, folder):
    """Return the tensors that PEFT itself writes, and the configuration among them."""
    model.save_pretrained(folder)
    return folder, json.loads((folder / "adapter_config.json").read_text())


@every
def test_the_adapter_begins_as_pefts_own_at_the_same_seed(adapter):
    """The adapter has the names and bits of `get_peft_model` with PEFT's defaults.
    On a base in bfloat16 too; at the start it adds nothing to the output.
    """
    names = {"task_type": "CAUSAL_LM"}
    lora = {**names, "r": 3, "lora_alpha": 5.0, "target_modules": "all-linear"}
    config = {
        "lora": lambda: LoraConfig(**lora),
        "dora": lambda: LoraConfig(**lora, use_dora=True),
        "rslora": lambda: LoraConfig(**lora, use_rslora=True),
        "ia3": lambda: IA3Config(**names),
    }[adapter]
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        ours = adapt(make().to(dtype), FAMILY[adapter]).model
        torch.manual_seed(3)
        theirs = get_peft_model(make().to(dtype), config())
        assert same(state(ours), state(theirs))
        assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
            n for n, p in theirs.named_parameters() if p.requires_grad
        }
        assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in ours.parameters() if not p.requires_grad} == {dtype}
    torch.testing.assert_close(logits(adapt(make(), FAMILY[adapter]).model), logits(make()), rtol=0, atol=1e-5)


@pytest.mark.slow
@every
def test_it_learns_on_a_frozen_base_and_plain_peft_loads_it(adapter, tmp_path):
    """The loss falls, the base keeps its bits, and plain PEFT loads the adapter.
    `PeftModel.from_pretrained` gives the trained logits, and so does the merged model.
    """
    base = make()
    before = state(base)
    model = adapt(base, FAMILY[adapter]).model
    untrained = logits(model)
    losses = trained(model)
    assert losses[-1] < 0.9 * losses[0]
    after = {name.replace(".base_layer", ""): tensor for name, tensor in state(model.get_base_model()).items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    expected = logits(model)
    assert (expected - untrained).abs().max() > 0.1
    folder, _ = saved(model, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(make(), folder)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-6)
    merged = plain.merge_and_unload()
    assert merged.state_dict().keys() == before.keys()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)


@every
def test_switched_off_it_is_the_base(adapter):
    """PEFT's own switch, DPO's reference, gives the base's logits exactly."""
    model = adapt(make(), FAMILY[adapter]).model
    trained(model, steps=2)
    with model.disable_adapter():
        off = logits(model)
    assert torch.equal(off, logits(make()))


@pytest.mark.parametrize("adapter", ["lora", "rslora", "dora"])
def test_what_is_added_is_the_papers_formula(adapter):
    """lora adds (alpha / r) B A x, rslora alpha / √r; dora scales the sum's columns."""
    settings = AdapterSettings(adapter=adapter, lora_r=3, lora_alpha=7.5, lora_dropout=0.25)
    model = adapt(make(), settings).model.eval()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (3, 16)
    assert layer.lora_dropout["default"].p == 0.25
    weight = layer.base_layer.weight + b @ a * (7.5 / (math.sqrt(3) if adapter == "rslora" else 3))
    if adapter == "dora":
        lengths = layer.base_layer.weight.norm(dim=1, keepdim=True)
        weight = weight * lengths / weight.norm(dim=1, keepdim=True)
    x = torch.randn(2, 16)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.fixture
def mesh():
    """A mesh of this process alone, over which weights can be divided."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_doras_lengths_on_divided_weights(mesh, dtype):
    """DoRA's lengths on divided weights have the bits of those on a whole model.
    The divided weights are in their places afterwards, and frozen.
    """
    torch.manual_seed(3)
    expected = adapt(make().to(dtype), FAMILY["dora"]).model
    base = make().to(dtype)
    for layer in base.model.layers:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    shards = dict(base.named_parameters())
    torch.manual_seed(3)
    model = adapt(base, FAMILY["dora"]).model
    found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state(model).items()}
    assert same(found, state(expected))
    assert all(not p.requires_grad for p in shards.values())
    assert {id(p) for p in model.parameters() if isinstance(p, DTensor)} == {
        id(p) for name, p in shards.items() if ".layers." in name
    }


def test_dora_is_refused_on_weights_without_values():
    """DoRA is refused on weights without values (hsdp's stand-ins, ZeRO-3), with what to do.
    lora reads no weights.
    """
    for shape in ((24, 16), (0,)):
        model = make()
        nothing = torch.zeros(()).expand(shape)
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(nothing)
        with pytest.raises(AdapterError, match="adapter=dora reads the base's weights.*use strategy=fsdp2, ddp or zero2"):
            adapt(model, FAMILY["dora"])
        assert len(targets_of(adapt(model, LORA).model)) == 7


def test_torch_seed_decides():
    """The same seed gives the same adapters, another seed others."""
    drawn = []
    for seed in (1, 1, 2):
        model = make()
        torch.manual_seed(seed)
        drawn.append(torch.cat([p.flatten() for n, p in adapt(model, LORA).model.named_parameters() if "lora_A" in n]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_configuration_is_short_and_sorted(tmp_path):
    """Targets are short names where these suffice, else full names, in one order everywhere."""
    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    for targets, expected in [
        (None, projections),
        (("attention",), ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (("up_proj", "layers.1.*.q_proj"), ["layers.1.self_attn.q_proj", "up_proj"]),
    ]:
        model = adapt(make(), AdapterSettings(adapter="lora", target_modules=targets)).model
        _, written = saved(model, tmp_path / str(len(expected)))
        assert written["target_modules"] == expected
        assert targets_of(model) == {name.rpartition(".")[2] for name in expected}
    model = adapt(
        make(), AdapterSettings(adapter="ia3", target_modules=("mlp", "v_proj"), feedforward_modules=("*.1.mlp.*",))
    ).model
    _, written = saved(model, tmp_path / "ia3")
    inputs = [f"layers.1.mlp.{name}" for name in ("down_proj", "gate_proj", "up_proj")]
    assert written["feedforward_modules"] == inputs
    assert written["target_modules"] == sorted([*inputs, *(name.replace(".1.", ".0.") for name in inputs), "v_proj"])
    torch.testing.assert_close(logits(PeftModel.from_pretrained(make(), tmp_path / "ia3")), logits(model), rtol=0, atol=1e-6)


def test_ia3_scales_inputs_of_the_feedforward_and_outputs_of_the_others():
    """ia3's default targets are PEFT's for the architecture.
    The factors are as long as what they scale.
    """
    model = adapt(make(), FAMILY["ia3"]).model
    shapes = {name.split(".")[-3]: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert shapes == {"k_proj": (8, 1), "v_proj": (8, 1), "down_proj": (1, 24)}
    only = adapt(make(), AdapterSettings(adapter="ia3", target_modules=("k_proj",))).model
    assert only.peft_config["default"].feedforward_modules == []


def test_ia3_without_targets_is_refused():
    """ia3 refuses an architecture without PEFT's targets, and inputs that are no targets."""
    unknown = make("granite")
    with pytest.raises(AdapterError, match="no target_modules of ia3 for 'granite': name both.*It has them for.* llama"):
        adapt(unknown, AdapterSettings(adapter="ia3"))
    with pytest.raises(AdapterError, match="no feedforward_modules of ia3 for 'granite'"):
        adapt(unknown, AdapterSettings(adapter="ia3", target_modules=("mlp",)))
    with pytest.raises(AdapterError, match="feedforward_modules mean up_proj, which target_modules do not"):
        adapt(make(), AdapterSettings(adapter="ia3", feedforward_modules=("up_proj",)))
    model = adapt(unknown, AdapterSettings(adapter="ia3", target_modules=("attention",))).model
    assert {p.shape[1] for p in model.parameters() if p.requires_grad} == {1}


def test_ia3s_factors_are_no_matrices():
    """ia3's factors do not decay and are not Muon's; the default rate is ia3's.
    Decay would pull them from 1 to 0, and a factor has no directions to make orthogonal.
    """
    model = adapt(make(), FAMILY["ia3"]).model
    groups = make_optimizer(model, OptimizerSettings(weight_decay=0.1)).param_groups
    assert [(len(group["params"]), group["weight_decay"], group["lr"]) for group in groups] == [(6, 0.0, 3e-3)]
    with pytest.raises(ValueError, match="no numbered layer of the model has a matrix that is trained"):
        make_optimizer(model, OptimizerSettings(optimizer="muon"))


def test_a_reward_models_score_is_trained_whole():
    """A reward model has adapters on every linear layer but `score`, which trains whole.
    It is saved beside them, so that plain PEFT loads it.
    """
    for settings in (LORA, FAMILY["ia3"]):
        adaptation = adapt(a_classifier(), settings)
        model = adaptation.model
        assert "score" not in targets_of(model)
        whole = {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name and "ia3" not in name}
        assert whole == {"base_model.model.score.modules_to_save.default.weight"}
        assert model.peft_config["default"].task_type == "SEQ_CLS"
        assert "score" in model.peft_config["default"].modules_to_save
        assert "score is trained whole" in adaptation.describe()
    with pytest.raises(AdapterError, match="score is trained whole beside the adapters already"):
        adapt(a_classifier(), AdapterSettings(adapter="lora", target_modules=("q_proj", "score")))


def test_an_adapter_on_an_untied_and_a_tied_head():
    """An adapter on an untied head trains; on a tied head it is refused.
    Merging it would change the embeddings.
    """
    settings = AdapterSettings(adapter="lora", target_modules=("lm_head",))
    model = adapt(make("llama-untied"), settings).model
    losses = trained(model)
    assert losses[-1] < 0.9 * losses[0]
    assert {"lm_head" in name for name in gradients(model)} == {True}
    with pytest.raises(AdapterError, match="lm_head shares its weight with the embeddings"):
        adapt(make("llama-tied"), settings)


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
def test_gpt2s_transposed_layers_carry_them_too(adapter, tmp_path):
    """Conv1D layers carry adapters by the same rules, without a warning of PEFT's."""
    config = tiny("GPT2").config
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(config)
    weights = state(base)
    model = adapt(base, FAMILY[adapter]).model
    assert model.peft_config["default"].fan_in_fan_out
    losses = trained(model, rate=0.2)
    assert losses[-1] < losses[0]
    folder, _ = saved(model, tmp_path)
    fresh = transformers.GPT2LMHeadModel(config)
    fresh.load_state_dict(weights)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(fresh, folder)), logits(model), rtol=0, atol=1e-6)


def test_what_trains_is_described():
    """`describe` lists kinds, names and numbers of layers, and parameters by part of the model."""
    assert adapt(make(), LORA).describe() == [
        "lora of rank 3 on 14 linear layers (attention: q_proj, k_proj, v_proj, o_proj; mlp: gate_proj, up_proj, down_proj)",
        "trains 1,392 of 6,288 parameters (22.14 %)",
        "  attention  672 of 2,208 (30.43 %)",
        "  mlp        720 of 3,024 (23.81 %)",
        "  embeddings 0 of 976 (0.00 %)",
        "  norms      0 of 80 (0.00 %)",
    ]
    assert adapt(make(), FAMILY["ia3"]).describe()[0] == "ia3 on 6 linear layers (attention: k_proj, v_proj; mlp: down_proj)"
    assert "  score      16 of 32 (50.00 %)" in adapt(a_classifier(), LORA).describe()
    assert "  embeddings 976 of 976 (100.00 %)" in adapt(make(), AdapterSettings()).describe()


def test_what_peft_refuses_is_refused_by_name():
    """The error has PEFT's reason and the model's class."""
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(AdapterError, match="PEFT cannot attach the adapter to MambaForCausalLM.*out_proj"):
        adapt(model, attrs.evolve(LORA, target_modules=("out_proj",)))


def test_a_second_adapter_is_refused_and_none_trains_everything():
    """A model with an adapter is not wrapped again; adapter='none' returns the model as it is."""
    model = adapt(make(), LORA).model
    with pytest.raises(AdapterError, match="already"):
        adapt(model, LORA)
    plain = make()
    assert adapt(plain, AdapterSettings()).model is plain
    assert all(p.requires_grad for p in plain.parameters())


class Own(torch.nn.Module):
    """A model that is not transformers': no configuration, and no generation."""

    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, VOCAB)

    def forward(self, input_ids, **_):
        """Return an object with logits."""
        return SimpleNamespace(logits=self.head(self.middle(self.words(input_ids)).tanh()))


@every
def test_a_model_that_is_not_transformers(adapter, tmp_path):
    """It takes an adapter and trains, and plain PEFT reads that back; PEFT's causal wrapper ended it with an AttributeError."""
    torch.manual_seed(0)
    base = Own()
    before = state(base)
    adapted = adapt(base, attrs.evolve(FAMILY[adapter], target_modules=("middle",))).model
    losses = trained(adapted)
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path)
    other = Own()
    other.load_state_dict(before)
    assert torch.equal(logits(PeftModel.from_pretrained(other, tmp_path)), logits(adapted))
