"""`target_modules`: names, ends of names, patterns and kinds, derived from the module tree."""

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model

from forge_algos import AdapterError, AdapterSettings
from forge_algos.adaptations.base import _unfrozen
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.adaptations.peft._target_names import selects, selects_feedforward, short_names

from ...oracle import SIZES, make
from ...preferences import a_classifier

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def last(names):
    """Last parts of names, each once, in their order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def tiny(kind, **changes):
    """A causal language model of another family, without weights."""
    few = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = getattr(transformers, f"{kind}Config")(
        **{**few, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes}
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", ["llama-tied", "llama-untied", "qwen3", "gemma3"])
def test_the_default_is_every_linear_layer_but_the_head(architecture):
    """All projections of every layer, in the model's order; neither the head nor the embeddings."""
    model = make(architecture)
    found = resolve_targets(model, None)
    assert last(found) == [*ATTENTION, *MLP]
    assert len(found) == 14
    assert found == [name for name, module in model.named_modules() if name in found and isinstance(module, torch.nn.Linear)]
    assert resolve_targets(model, ["all-linear"]) == found
    assert resolve_targets(model, ["mlp", "attention"]) == found


def test_targets_of_a_bare_decoder_and_a_reward_model():
    """Target names are those of the given model; a reward model's score is no target of a kind."""
    whole = resolve_targets(make(), ["attention"])
    assert resolve_targets(make().model, ["attention"]) == [name.removeprefix("model.") for name in whole]
    assert resolve_targets(a_classifier(), None) == resolve_targets(make(), None)
    assert resolve_targets(a_classifier(), ["score"]) == ["score"]


@pytest.mark.parametrize(
    ("kind", "changes", "attention", "mlp"),
    [
        ("GPT2", {}, ["c_attn", "c_proj"], ["c_fc", "c_proj"]),
        ("GPTNeoX", {"intermediate_size": 24}, ["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
        ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 8}, ["k_proj", "v_proj", "q_proj", "out_proj"], ["fc1", "fc2"]),
        ("Phi3", {"intermediate_size": 24}, ["o_proj", "qkv_proj"], ["gate_up_proj", "down_proj"]),
        ("Falcon", {}, ["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
    ],
)
def test_kinds_are_found_in_the_module_tree(kind, changes, attention, mlp):
    """Kinds are found in families that name and nest their layers differently.
    OPT has linear layers outside of its decoder layers, which belong to no kind.
    """
    model = tiny(kind, **changes)
    assert last(resolve_targets(model, ["attention"])) == attention
    assert last(resolve_targets(model, ["mlp"])) == mlp
    both = {*resolve_targets(model, ["attention"]), *resolve_targets(model, ["mlp"])}
    outside = {"project_in", "project_out"} if kind == "OPT" else set()
    assert {name.rpartition(".")[2] for name in {*resolve_targets(model, None)} - both} == outside


@pytest.mark.parametrize(
    "expression",
    [
        r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
        r".*\.(q|v)_proj",
        r"model\.layers\.1\..*_proj",
        r"(?!.*mlp).*_proj",
    ],
)
def test_a_regular_expression_is_read_as_by_peft(expression):
    """Behind `re:` it fits whole names, as a text does in PEFT (0.21, `match_target_against_key`); the first is Axolotl's."""
    model = make()
    config = LoraConfig(r=2, target_modules=expression)
    theirs = [
        name for name, module in get_peft_model(make(), config).base_model.model.named_modules() if hasattr(module, "lora_A")
    ]
    assert theirs
    assert resolve_targets(model, [f"re:{expression}"]) == theirs
    assert set(resolve_targets(model, [f"re:{expression}", "o_proj"])) >= set(theirs)


@pytest.mark.parametrize(
    ("expression", "message"),
    [("q_proj", "re:q_proj matches no linear layer"), ("lm_head", "re:lm_head matches no linear layer")],
)
def test_a_regular_expression_that_fits_nothing(expression, message):
    """It is of whole names, and the head is no target of it."""
    with pytest.raises(AdapterError, match=message):
        resolve_targets(make(), [f"re:{expression}"])


@pytest.mark.parametrize("wrong", ["re:model.(", "re:(a{999}){999}"])
def test_what_is_no_regular_expression(wrong):
    """It is refused with the settings, before a model is there."""
    with pytest.raises(ValueError, match="target_modules=re:.* (is no regular expression|repeats more than)"):
        AdapterSettings(adapter="lora", target_modules=(wrong,))


def test_the_search_for_a_regular_expression_has_an_end(monkeypatch):
    """As that of `unfrozen_parameters` has."""
    monkeypatch.setattr(_unfrozen, "SECONDS", 0.05)
    with pytest.raises(AdapterError, match="target_modules=re:.*: its search among the model's names"):
        resolve_targets(make(), [r"re:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\8\7\6\5\4\3\2\1[qz]"])


def test_kinds_do_not_depend_on_names():
    """The same layers are found under names without meaning."""

    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.value, self.out = (torch.nn.Linear(2, 2) for _ in range(3))

    layer = torch.nn.ModuleDict({"one": Mixer(), "two": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    model = torch.nn.ModuleDict({"stack": torch.nn.ModuleList([layer]), "outer": torch.nn.Linear(2, 2)})
    assert resolve_targets(model, ["attention"]) == ["stack.0.one.query", "stack.0.one.value", "stack.0.one.out"]
    assert resolve_targets(model, ["mlp"]) == ["stack.0.two.0"]
    assert resolve_targets(model, None)[-1] == "outer"


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["mlp.up_proj"], ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]),
        (["layers.0.*_proj"], [f"model.layers.0.self_attn.{n}" for n in ATTENTION] + [f"model.layers.0.mlp.{n}" for n in MLP]),
        (["[qk]_proj"], [f"model.layers.{i}.self_attn.{n}" for i in (0, 1) for n in ("q_proj", "k_proj")]),
        (["layers.?.self_attn.v*", "v_proj"], ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]),
        (["up_proj", "layers.0.mlp.*"], [f"model.layers.0.mlp.{n}" for n in MLP] + ["model.layers.1.mlp.up_proj"]),
    ],
)
def test_names_and_patterns(targets, expected):
    """Full names, ends of names at a dot, patterns on either; each once, in the model's order."""
    assert resolve_targets(make(), targets) == expected


def test_the_head_is_matched_by_its_full_name_only():
    """Neither a pattern nor a kind matches the head."""
    assert resolve_targets(make("llama-untied"), ["lm_head", "layers.0.mlp.up_proj"]) == [
        "model.layers.0.mlp.up_proj",
        "lm_head",
    ]
    assert len(resolve_targets(make("llama-untied"), ["*"])) == 14
    with pytest.raises(AdapterError, match=r"lm_h\* matches no linear layer"):
        resolve_targets(make("llama-untied"), ["lm_h*"])


def test_names_joined_by_commas_are_told_apart():
    """Whoever writes them as one word is told how several are given, not that one of them is near."""
    with pytest.raises(
        AdapterError, match=r"LlamaForCausalLM\. Give each name by itself, without commas: q_proj v_proj\. Kinds"
    ):
        resolve_targets(make(), ["q_proj,v_proj"])


def test_what_matches_nothing_is_named():
    """The error lists the wrong names, the nearest right ones, the kinds and all layers.
    Names that match are not in it.
    """
    with pytest.raises(
        AdapterError,
        match=r"target_modules: down_prj, proj matches no linear layer of LlamaForCausalLM\. Did you mean down_proj.*"
        r"Kinds: attention, mlp, all-linear\. "
        r"Linear layers here: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$",
    ) as caught:
        resolve_targets(make(), ["q_proj", "down_prj", "proj"])
    assert caught.value.exit_status == 2


def test_a_module_that_is_no_linear_layer_is_named():
    """The error names the module's class, and the pattern for the linear layers inside it."""
    with pytest.raises(
        AdapterError, match=r"self_attn \(LlamaAttention\) is no linear layer: say self_attn\.\* for those in it"
    ):
        resolve_targets(make(), ["self_attn"])
    with pytest.raises(AdapterError, match=r"input_layernorm \(LlamaRMSNorm\) is no linear layer\. Kinds"):
        resolve_targets(make(), ["input_layernorm"])
    with pytest.raises(AdapterError, match=r"all-linear matches no linear layer of Module\. .*Linear layers here: none$"):
        resolve_targets(torch.nn.Module(), None)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_short_names_select_the_same_layers(data):
    """PEFT's rules select the same layers by the short names as by the full ones.
    For any choice of layers; the list of short names is never longer than that of full names.
    """
    part = st.sampled_from(["a", "ba", "0", "1", "up", "n.0"])
    paths = data.draw(st.sets(st.lists(part, min_size=1, max_size=3).map(".".join), min_size=1, max_size=9))
    model = torch.nn.Module()
    for path in sorted(paths):
        at = model
        for name in path.split("."):
            if name not in dict(at.named_children()):
                at.add_module(name, torch.nn.Module())
            at = at.get_submodule(name)
    names = [name for name, _ in model.named_modules() if name]
    wanted = [name for name in names if data.draw(st.booleans())]
    for rule in (selects, selects_feedforward):
        short = short_names(model, wanted, rule=rule)
        # A whole name that ends another one matches both; no list of names can separate them.
        inseparable = {n for n in names if n not in wanted and any(rule(w, n) for w in wanted)}
        assert {n for n in names if any(rule(s, n) for s in short)} - inseparable == set(wanted)
        assert len(short) <= len(wanted)
