"""An adapter directory goes on as PEFT's own model of it, and is refused where it is another model's."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from forge_algos import AdapterError, AdapterSettings, adapt
from forge_algos.adaptations import stored_adapter

from ...experts import mixture

IDS = torch.arange(3, 12)[None]
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora of rslora's scale": {"use_dora": True, "use_rslora": True},
    "a pattern": {"target_modules": r".*\.(q|v)_proj", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "some layers": {"layers_to_transform": [1]},
    "whole modules": {"modules_to_save": ["embed_tokens"]},
    "token rows": {"trainable_token_indices": {"embed_tokens": [1, 2]}},
    "token rows in any order": {"trainable_token_indices": {"embed_tokens": [7, 4, 11]}},
    "token rows as a list": {"trainable_token_indices": [7, 4]},
}
ignore_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def tiny(**changes):
    """The base, always with the same weights."""
    torch.manual_seed(3)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **changes}))


def written(folder, **more):
    """Write PEFT's adapter with values that are not its first; return its logits."""
    given = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny(), LoraConfig(**{**given, **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return logits(model)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def going_on(folder, model=None, **more):
    return adapt(
        tiny() if model is None else model, AdapterSettings(**{"adapter": "lora", "adapter_path": str(folder), **more})
    )


@ignore_peft
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_pefts_own_model_of_the_directory(kind, tmp_path):
    """Logits, trained parameters and what PEFT writes of it are the same to the bit."""
    expected = written(tmp_path / "first", **KINDS[kind])
    found = going_on(tmp_path / "first", adapter=kind.split()[0] if kind.startswith(("rslora", "dora")) else "lora")
    assert torch.equal(logits(found.model), expected)
    theirs = PeftModel.from_pretrained(tiny(), tmp_path / "first", is_trainable=True)
    trained = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (found.model, theirs)]
    assert trained[0] == trained[1]
    found.model.save_pretrained(tmp_path / "second")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text"])
def test_expert_matrices_go_on(family, tmp_path):
    """The low-rank factors of each expert, beside those of linear layers."""
    first = adapt(mixture(family), AdapterSettings(adapter="lora", lora_r=3)).model
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    first.save_pretrained(tmp_path)
    found = going_on(tmp_path, mixture(family), target_modules=["all-linear"])
    assert torch.equal(logits(found.model), logits(first))
    assert {n for n, p in found.model.named_parameters() if p.requires_grad} == {
        n for n, p in first.named_parameters() if p.requires_grad
    }


@ignore_peft
def test_names_and_shapes_are_compared_without_numbers(tmp_path):
    """On an outline too: the base of another width."""
    written(tmp_path)
    with torch.device("meta"):
        going_on(tmp_path, tiny())
    with torch.device("meta"), pytest.raises(AdapterError, match=r"others\) is \[4, 32\] there, and \[4, 64\] here"):
        going_on(tmp_path, tiny(hidden_size=64))


@ignore_peft
def test_the_adapter_of_another_model_is_refused(tmp_path):
    """A layer too few, a layer too many, a tensor that is missing."""
    written(tmp_path)
    with pytest.raises(AdapterError, match="for which the model has no place"):
        going_on(tmp_path, tiny(num_hidden_layers=1))
    with pytest.raises(AdapterError, match="it lacks base_model"):
        going_on(tmp_path, tiny(num_hidden_layers=3))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="it lacks base_model"):
        going_on(tmp_path)


@ignore_peft
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"lora_r": 8}, "lora_r=8: the adapter in adapter_path .* has lora_r=4"),
        ({"lora_alpha": 8.0}, "has lora_alpha=7"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"rank_pattern": ["q_proj=3"]}, "rank_pattern"),
        ({"alpha_pattern": ["q_proj=3"]}, "alpha_pattern"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"adapter": "dora"}, "holds a lora adapter, and adapter=dora"),
    ],
)
def test_what_it_has_cannot_be_changed(given, match, tmp_path):
    """A setting that says something else is refused by name; one that says the same is not."""
    written(tmp_path)
    with pytest.raises(AdapterError, match=match):
        going_on(tmp_path, **given)
    going_on(tmp_path, target_modules=["q_proj", "down_proj"], lora_r=4, lora_alpha=7.0, rank_pattern=["q_proj=4"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"peft_type": "IA3"}, "holds an ia3 adapter, and adapter=lora"),
        ({"peft_type": "ADALORA"}, "of the kind ADALORA"),
        ({"init_lora_weights": "corda"}, "belongs beside a base that init_lora_weights=corda changed"),
        ({"use_qalora": True}, "use_qalora=True .* is an option of PEFT that is not trained here"),
        ({"r": "four"}, "is not what PEFT writes"),
        ({"r": True}, "is not what PEFT writes"),
        ({"lora_alpha": 0}, "is not what PEFT writes"),
        ({"lora_alpha": float("nan")}, "is not what PEFT writes"),
        ({"rank_pattern": None}, "is not what PEFT writes .*rank_pattern"),
        ({"target_modules": 5}, "is not what PEFT writes .target_modules=5"),
        ({"target_modules": "((("}, "is not what PEFT writes .target_modules"),
        ({"exclude_modules": ["q_proj", 1]}, "is not what PEFT writes .exclude_modules"),
        ({"use_dora": True, "use_rslora": True}, "holds a dora adapter, and adapter=lora: set adapter=dora"),
    ],
)
def test_what_is_no_lora_is_refused(change, match, tmp_path):
    """Without torch or peft, from the configuration alone."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"], **change}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(AdapterError, match=match):
        stored_adapter(tmp_path, "lora")
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="is not what PEFT writes"):
        stored_adapter(tmp_path, "lora")


def test_a_pickle_is_not_read(tmp_path):
    """adapter_model.bin is named, and what to do."""
    with pytest.raises(AdapterError, match="no such directory"):
        stored_adapter(tmp_path / "none", "lora")
    with pytest.raises(AdapterError, match="it has no adapter_config"):
        stored_adapter(tmp_path, "lora")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(AdapterError, match=r"only adapter_model\.bin: pickled files run code"):
        stored_adapter(tmp_path, "lora")


@ignore_peft
def test_a_row_that_is_named_twice_is_refused(tmp_path):
    """It has no one value."""
    written(tmp_path, trainable_token_indices={"embed_tokens": [4, 4]})
    with pytest.raises(AdapterError, match="names a row twice"):
        going_on(tmp_path)


@ignore_peft
@pytest.mark.filterwarnings("ignore:.*have invalid shape:UserWarning", "ignore:`lora_bias=True` was passed:UserWarning")
def test_lora_fa_keeps_the_a_that_it_was_given(tmp_path):
    """B and its bias train, A is the directory's."""
    expected = written(tmp_path, lora_bias=True)
    found = going_on(tmp_path, lora_fa=True)
    assert torch.equal(logits(found.model), expected)
    assert {name for name, p in found.model.named_parameters() if p.requires_grad and "lora_A" in name} == set()
