"""`unfrozen_parameters`: which weights move, and which names are refused."""

import re

import pytest

from forge_algos import AdapterError, AdapterSettings, adapt
from forge_algos.adaptations.base import _unfrozen

from ...oracle import make
from ...preferences import a_classifier


def moving(*patterns, model=None):
    """Return the names of the parameters that train."""
    adapted = adapt(make() if model is None else model, AdapterSettings(unfrozen_parameters=patterns)).model
    return {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}


def test_patterns_name_weights_by_the_beginning_of_their_names():
    """A pattern ends where a part of a name ends, and several add up; a head that is tied trains with the embeddings."""
    every = {name for name, _ in make().named_parameters()}
    assert moving(".*") == every
    assert moving("model.layers.1") == {name for name in every if name.startswith("model.layers.1.")}
    assert moving("model.layers.[0-9]+.mlp.down_proj.weight$", "model.norm") == {
        *(f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)),
        "model.norm.weight",
    }
    assert moving("lm_head") == {"model.embed_tokens.weight"}
    assert moving("lm_head", model=make("llama-untied")) == {"lm_head.weight"}


@pytest.mark.parametrize("number", [1, 2, -1])
@pytest.mark.parametrize("modules", ["all", "mlp", "self_attn,post_attention_layernorm"])
def test_so_many_layers(number, modules):
    """`last:1` and `first:1.mlp` are LLaMA-Factory's `freeze_trainable_layers` and `freeze_trainable_modules`.

    Its rule (0.9.6, `model/adapter.py`, `_setup_freeze_tuning`): the last layers, or the first for a number below 0; of these
    weights whose name has `.LAYER.MODULE` in it.
    """
    names, count = [name for name, _ in make().named_parameters()], 2
    layers = range(max(0, count - number), count) if number > 0 else range(min(-number, count))
    parts = [f".{layer}.{'' if module == 'all' else module}" for module in modules.split(",") for layer in layers]
    theirs = {name for name in names if any(part in name for part in parts)}
    end = f"last:{number}" if number > 0 else f"first:{-number}"
    assert moving(*(end if module == "all" else f"{end}.{module}" for module in modules.split(","))) == theirs


def test_more_layers_than_there_are():
    """They are refused with their number; so are none."""
    for number in (0, 3):
        with pytest.raises(AdapterError, match=f"unfrozen_parameters=last:{number}: the model has 2 layers"):
            moving(f"last:{number}")


def test_what_is_frozen_stays_frozen_and_a_new_head_trains():
    """The scoring layer of a reward model trains in any case."""
    model = make()
    model.model.layers[0].requires_grad_(requires_grad=False)
    assert moving("model.layers", model=model) == {
        name for name, _ in make().named_parameters() if name.startswith("model.layers.1.")
    }
    assert "score.weight" in moving("model.norm", model=a_classifier())


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("layers.1",), "unfrozen_parameters=layers.1: names no weight, whose names are like model.layers.1"),
        (("model.norm", "model.layers.9"), "unfrozen_parameters=model.layers.9: names no weight"),
        (("model.nor",), "names no weight, whose names are like model.norm.weight"),
        (("model.embed_tokens",), r"is frozen in this model \(model.embed_tokens.weight\)"),
    ],
)
def test_a_pattern_that_moves_nothing_is_refused(patterns, message):
    """It is named, with what there is."""
    model = make()
    model.model.embed_tokens.requires_grad_(requires_grad=False)
    with pytest.raises(AdapterError, match=message):
        moving(*patterns, model=model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"unfrozen_parameters": ("model.(",)}, r"unfrozen_parameters=model.\( is no regular expression"),
        ({"unfrozen_parameters": ("model.embed_tokens.weight$[:10]",)}, "a weight trains as a whole"),
        ({"unfrozen_parameters": ()}, "at least one name"),
        ({"unfrozen_parameters": ("lm_head",), "adapter": "lora"}, "has no effect with adapter='lora'.*set adapter=none"),
    ],
)
def test_impossible_patterns_are_refused(given, message):
    """Before a model is there."""
    with pytest.raises(ValueError, match=message):
        AdapterSettings(**given)


@pytest.mark.parametrize(
    "slow", [r"([\w.]+)*", "(?:a|aa)+", "(.*){5}", "((a|b))*", "(a?a?)*", r"(\w{1,}\.){2,}", ".*.*.*.*.*.*.*.*", "(.?){60}"]
)
@pytest.mark.parametrize("end", ["=", "[xyz]{3}"])
def test_an_expression_with_many_repeats_is_searched_at_once(slow, end, monkeypatch):
    """For such some engines take hours on names that do not fit."""
    monkeypatch.setattr(_unfrozen, "SECONDS", 1.0)
    with pytest.raises(AdapterError, match="names no weight"):
        moving(f"model{slow}{end}")


@pytest.mark.parametrize(
    "plain",
    [
        r"(.+\.)?norm",
        r"model\.layers\.(0|2[0-9])\..*",
        r"model\.(layers\.(0|1))+",
        r"(\w+\.)*norm",
        r"(\w+\.){2}0",
        "(?i)MODEL.NORM",
    ],
)
def test_repeats_within_repeats_are_taken(plain):
    """They were refused as ones that may take hours."""
    assert moving(plain)


def test_a_search_has_an_end(monkeypatch):
    """What no engine finds quickly is refused by name after some seconds."""
    monkeypatch.setattr(_unfrozen, "SECONDS", 0.05)
    hours = r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\8\7\6\5\4\3\2\1[qz]"
    with pytest.raises(AdapterError, match=re.escape(f"unfrozen_parameters={hours}: its search among the model's names")):
        moving(hours)


@pytest.mark.parametrize("counts", ["((a{1000}){1000}){1000}", "(a{,1000}){99}", "a{99999999999999999999}"])
def test_an_expression_too_large_to_write_out_is_refused(counts):
    """Its counted repeats took all memory before a name was looked at."""
    with pytest.raises(ValueError, match=re.escape(f"unfrozen_parameters={counts}: repeats more than 10,000 times")):
        AdapterSettings(unfrozen_parameters=(counts,))
