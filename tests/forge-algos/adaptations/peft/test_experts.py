"""LoRA on expert matrices: PEFT's target parameters against dense weights, and what is refused."""

import copy
import json

import pytest
import torch
from peft import PeftModel

from forge_algos import AdapterError, AdapterSettings, adapt
from forge_algos.adaptations import switched_off
from forge_algos.adaptations.base._targets import resolve_targets

from ...experts import FAMILIES, E, mixture
from ...oracle import make

IDS = torch.arange(3, 14)[None]
R = 3
LORA = AdapterSettings(adapter="lora", lora_r=R, lora_alpha=6.0)
SCALE = 2.0


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def shaken(adaptation):
    """Give every adapter random numbers, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adaptation.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adaptation.model


def stacks_of(model):
    """Return the names of parameters with three dimensions."""
    return {name: p for name, p in model.named_parameters() if p.ndim == 3}


def factors(adapted, name):
    """Return (A [E, r, inputs], B [E, outputs, r]) of a parameter, by their documented places in PEFT's matrices."""
    home, _, key = name.rpartition(".")
    layer = adapted.get_base_model().get_submodule(home)
    while layer.parameter_name != key:
        layer = layer.base_layer
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    if "experts" not in type(layer.get_base_layer()).__name__.lower():
        return A[None], B[None]
    return A.reshape(E, R, -1), torch.stack([B[:, e::E] for e in range(E)])


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_a_low_rank_change_of_each_expert_matrix(family, tmp_path):
    """The adapter begins at the base's logits; filled, its logits are those of W + ΔW for each expert and layer.
    ΔW is added to a plain model here, one matrix at a time. Plain PEFT loads the directory, and merges it to the same.
    """
    model, plain = mixture(family), mixture(family)
    before = logits(model)
    adaptation = adapt(model, LORA)
    assert torch.equal(logits(adaptation.model), before)
    adapted = shaken(adaptation)
    targets = set(adapted.base_model.targeted_module_names) | set(adapted.base_model.targeted_parameter_names)
    assert set(stacks_of(plain)) <= targets
    with torch.no_grad():
        for name in targets:
            if name in dict(plain.named_modules()):
                layer = adapted.get_base_model().get_submodule(name)
                weight = plain.get_submodule(name).weight
                weight += SCALE * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
                continue
            (A, B), weight = factors(adapted, name), plain.get_parameter(name)
            for e, matrix in enumerate(weight if weight.ndim == 3 else weight[None]):
                delta = SCALE * B[e] @ A[e]
                matrix += delta if delta.shape == matrix.shape and family != "gpt_oss" else delta.T
    order = list(adapted.state_dict())
    expected = logits(adapted)
    # PEFT takes parameters out of their modules meanwhile.
    assert list(adapted.state_dict()) == order
    torch.testing.assert_close(expected, logits(plain), rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.05
    with switched_off(adapted):
        assert torch.equal(logits(adapted), before)
    adapted.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_parameters"] == sorted(written["target_parameters"])
    loaded = PeftModel.from_pretrained(mixture(family), tmp_path)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-6)
    merged = loaded.merge_and_unload()
    assert merged.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_its_gradients_are_the_dense_ones_by_the_chain_rule(family):
    """With G the gradient of W + ΔW in a plain model, A's gradient is s Bᵀ G and B's s G Aᵀ, for each expert."""
    adapted = shaken(adapt(mixture(family), LORA))
    dense = copy.deepcopy(adapted).merge_and_unload()
    for model in (adapted, dense):
        for parameter in model.parameters():
            parameter.requires_grad = True
        model(input_ids=IDS, labels=IDS).loss.backward()
    for name, weight in stacks_of(dense).items():
        home, _, key = name.rpartition(".")
        layer = adapted.get_base_model().get_submodule(home)
        while layer.parameter_name != key:
            layer = layer.base_layer
        A, B = factors(adapted, name)
        G = weight.grad.mT if family == "gpt_oss" else weight.grad
        dA = layer.lora_A["default"].weight.grad.reshape(E, R, -1)
        dB = layer.lora_B["default"].weight.grad
        torch.testing.assert_close(dA, SCALE * B.mT @ G, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(torch.stack([dB[:, e::E] for e in range(E)]), SCALE * G @ A.mT, rtol=1e-3, atol=1e-6)


def test_a_dense_layer_is_not_taken_for_an_expert():
    """PEFT reads gate_proj, up_proj and down_proj in target_modules of DeepSeek-V3 as names of experts.
    The dense layer and the shared expert carry adapters all the same, of the rank that was asked for.
    """
    adapted = adapt(mixture("deepseek_v3"), LORA).model
    held = {
        name.partition(".lora_A")[0].removeprefix("base_model.model.") for name in adapted.state_dict() if ".lora_A" in name
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert {f"model.layers.0.mlp.{name}", f"model.layers.1.mlp.shared_experts.{name}"} <= held
    assert not adapted.peft_config["default"].rank_pattern
    only = adapt(mixture("deepseek_v3"), AdapterSettings(adapter="lora", lora_r=R, target_modules=("layers.0.mlp.*",))).model
    assert set(only.base_model.targeted_parameter_names) == {
        f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")
    }


def test_experts_are_chosen_and_left_out_by_name_and_kind():
    """Stacks have names, ends of names, patterns and a kind like linear layers; `mlp` does not include them."""
    model = mixture("deepseek_v3")
    stacks = [f"model.layers.1.mlp.experts.{key}" for key in ("gate_up_proj", "down_proj")]
    assert resolve_targets(model, ["experts"]) == stacks
    assert resolve_targets(model, ["experts.down_proj"]) == stacks[1:]
    assert resolve_targets(model, ["gate_up_proj"]) == resolve_targets(model, [stacks[0]]) == stacks[:1]
    assert set(stacks) <= set(resolve_targets(model, ["layers.1.*"]))
    assert not set(stacks) & set(resolve_targets(model, ["attention", "mlp"]))
    assert set(resolve_targets(model, None)) == {*stacks, *resolve_targets(model, ["attention", "mlp"])}
    jet = mixture("jetmoe")
    assert "model.layers.0.mlp.input_linear" in resolve_targets(jet, ["experts"])
    assert resolve_targets(jet, ["layers.0.mlp.input_linear"]) == ["model.layers.0.mlp.input_linear"]
    with pytest.raises(AdapterError, match="Linear layers and expert matrices here: down_proj, gate_up_proj, k_proj"):
        resolve_targets(mixture(), ["wrong"])
    with pytest.raises(AdapterError, match="experts .Qwen3MoeExperts. is no linear layer: say mlp.experts.. for those in it"):
        resolve_targets(mixture(), ["mlp.experts"])


@pytest.mark.parametrize(
    ("family", "router"),
    [("llama4_text", "model.layers.0.feed_forward.router"), ("phimoe", "model.layers.0.mlp.router")],
)
def test_a_router_that_is_no_plain_linear_layer_is_no_target(family, router):
    """Llama 4's and Phi-MoE's routers are subclasses of nn.Linear that return more than one tensor."""
    model = mixture(family)
    assert isinstance(model.get_submodule(router), torch.nn.Linear)
    assert router not in resolve_targets(model, None)
    with pytest.raises(AdapterError, match=rf"{router} \(\w+Router\) is no linear layer"):
        resolve_targets(model, [router])


def test_a_subclass_that_computes_as_a_linear_layer_is_a_target():
    """A subclass of nn.Linear with a forward of its own counts where it maps [..., M] to [..., N]."""

    class Plain(torch.nn.Linear):
        def forward(self, x):
            return x @ self.weight.T + self.bias

    class Grouped(torch.nn.Linear):
        def forward(self, x):
            return torch.bmm(x.reshape(-1, 2, 4).transpose(0, 1), self.weight.view(2, -1, 4).mT)

    model = torch.nn.ModuleDict({"plain": Plain(4, 6), "grouped": Grouped(4, 6)})
    assert resolve_targets(model, None) == ["plain"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout=0.1: model.layers.0.mlp.experts.gate_up_proj and 3 others are expert matrices"),
        ({"adapter": "dora"}, "which adapter=dora of PEFT cannot adapt: use adapter=lora or rslora"),
    ],
)
def test_what_peft_cannot_do_with_experts_is_refused(changes, message):
    """Dropout and DoRA on expert matrices are refused before the model is touched, with a remedy that works."""
    settings = {"adapter": "lora", "lora_r": R, **changes}
    model = mixture()
    before = list(model.state_dict())
    with pytest.raises(AdapterError, match=message) as caught:
        adapt(model, AdapterSettings(**settings))
    assert list(model.state_dict()) == before
    names = str(caught.value).rpartition("target_modules=")[2].split(",")
    adapted = adapt(model, AdapterSettings(**settings, target_modules=tuple(names)))
    assert "0 of 4,608" in next(line for line in adapted.describe() if line.startswith("  experts"))


def test_layers_that_peft_takes_for_experts_are_refused_where_it_cannot_adapt_them():
    """The same holds for the dense layers of families in which PEFT takes them for experts."""
    settings = {"adapter": "dora", "target_modules": ("layers.0.mlp.*",)}
    with pytest.raises(AdapterError, match="PEFT takes model.layers.0.mlp.gate_proj and 2 others for experts"):
        adapt(mixture("deepseek_v3"), AdapterSettings(**settings))
    adapt(make(), AdapterSettings(**settings))


def test_ia3_and_a_single_transposed_expert_are_refused():
    """ia3 has no form for expert matrices; PEFT's ΔW of a single one is [outputs, inputs]."""
    with pytest.raises(AdapterError, match="which adapter=ia3 of PEFT cannot adapt"):
        adapt(mixture(), AdapterSettings(adapter="ia3", target_modules=("experts",), feedforward_modules=("experts",)))
    with pytest.raises(AdapterError, match="is a single expert, whose layout PEFT mistakes"):
        adapt(mixture("gpt_oss", num_local_experts=1, num_experts_per_tok=1), LORA)


def test_a_single_expert_is_adapted_like_several(tmp_path):
    """The logits are those of W + ΔW, ΔW = scale · B A; plain PEFT loads the directory, and merges it to the same."""
    changes = {"num_experts": 1, "num_experts_per_tok": 1}
    plain = mixture(**changes)
    adapted = shaken(adapt(mixture(**changes), LORA))
    found = logits(adapted)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(mixture(**changes), tmp_path)
    torch.testing.assert_close(logits(loaded), found)
    torch.testing.assert_close(logits(loaded.merge_and_unload(safe_merge=True)), found, rtol=1e-4, atol=1e-5)
    state = adapted.state_dict()
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            home, _, key = f"base_model.model.{name.removesuffix('.weight')}".rpartition(".")
            inner = {"gate_up_proj": f"{home}.base_layer", "down_proj": home}.get(key, f"{home}.{key}")
            if (A := state.get(f"{inner}.lora_A.default.weight")) is not None:
                weight += SCALE * state[f"{inner}.lora_B.default.weight"] @ A
    torch.testing.assert_close(logits(plain), found, rtol=1e-4, atol=1e-5)


def test_what_trains_of_experts_is_described():
    """The log names the expert matrices and counts what trains of each part."""
    assert adapt(mixture(), LORA).describe() == [
        "lora of rank 3 on 8 linear layers and 16 expert matrices (attention: q_proj, k_proj, v_proj, o_proj; experts: "
        "gate_up_proj, down_proj)",
        "trains 2,304 of 10,624 parameters (21.69 %)",
        "  attention  672 of 2,208 (30.43 %)",
        "  experts    1,632 of 6,240 (26.15 %)",
        "  router     0 of 128 (0.00 %)",
        "  embeddings 0 of 976 (0.00 %)",
        "  head       0 of 976 (0.00 %)",
        "  norms      0 of 96 (0.00 %)",
    ]
