"""Checking a model before its weights are read: its class, its tensors by their headers, its rows."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forge_dist import ModelError, check_model
from forge_dist.loading import _outline


def edit(path, **values):
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_rows_without_reading_weights(save_base, architecture, monkeypatch):
    """The rows of the embedding, from headers alone; the random state is as before."""
    path = save_base(architecture)
    state = torch.get_rng_state()
    monkeypatch.setattr("safetensors.safe_open", None)
    assert check_model(path) == 61
    assert torch.equal(torch.get_rng_state(), state)


def test_a_reward_model_and_one_that_becomes_it(base, tmp_path):
    """A causal model may become a reward model, and a classifier with one label is one."""
    assert check_model(base, task="reward") == 61
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    reward.save_pretrained(tmp_path / "reward")
    assert check_model(str(tmp_path / "reward"), task="reward") == 61


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama9"}, r"model_type 'llama9', which transformers [\d.]+ does not know"),
        (
            {"architectures": ["Llama9ForCausalLM"]},
            r"architectures \[\"Llama9ForCausalLM\"\], and transformers .* no such class",
        ),
        ({"model_type": "t5", "architectures": ["LlamaForCausalLM"]}, r"cannot be loaded: Unrecognized configuration class"),
    ],
)
def test_a_class_that_transformers_lacks(base, change, message):
    """The type or class that config.json names is one of the installed transformers, or the message has its version."""
    edit(base, **change)
    with pytest.raises(ModelError, match=message) as refused:
        check_model(base)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "the values in its config.json make no model: ZeroDivisionError"),
        ({"hidden_size": 17}, r"cannot be loaded: .*hidden size \(17\) is not a multiple"),
        ({"num_hidden_layers": "two"}, "Validation error for field 'num_hidden_layers'"),
        ({"hidden_act": "sillu"}, "the values in its config.json make no model: KeyError: 'sillu'"),
    ],
)
def test_values_of_which_no_model_can_be_made(base, change, message):
    """Whatever error transformers meets in a configuration, it is the model's, and bad input."""
    edit(base, **change)
    with pytest.raises(ModelError, match=message):
        check_model(base)


def test_a_class_is_found_without_listing_all(base, monkeypatch):
    """The 5,000 names of transformers take a sixth of a second, of each process that begins a run."""
    monkeypatch.setattr("forge_dist.loading._outline._class_names", lambda: pytest.fail("all names were listed"))
    assert check_model(base) == 61


def test_a_class_whose_module_lacks_a_library_is_there(base, monkeypatch):
    """What is missing is said where the model is made, and not that transformers has no such class."""

    class Lazy(type(transformers)):
        def __getattribute__(self, name):
            if name == "LlamaForCausalLM":
                raise ModuleNotFoundError("no library for it")
            return super().__getattribute__(name)

    monkeypatch.setattr(transformers, "__class__", Lazy)
    assert _outline._is_class("LlamaForCausalLM")
    assert not _outline._is_class("Llama9ForCausalLM")
    assert not _outline._is_class("__name__x")


def test_other_capitals_are_the_same_class(base):
    """Some published configurations write their class with other capitals."""
    edit(base, architectures=["LLaMAForCausalLM"])
    assert check_model(base) == 61


def test_weights_of_another_class(base, tmp_path):
    """Weights of another architecture are refused with what is missing, left over and of another shape, and how many."""
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    )
    gpt2.save_pretrained(tmp_path / "gpt2")
    (Path(base) / "model.safetensors").unlink()
    (tmp_path / "gpt2" / "model.safetensors").rename(Path(base) / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        check_model(base)
    for part in (
        "lacks weight lm_head.weight and 20",
        " others",
        "has the unexpected weight transformer.",
        "do not fit LlamaForCausalLM",
    ):
        assert part in str(refused.value)


def test_weights_of_another_shape(base):
    """A tensor of another shape is named with both shapes."""
    file = Path(base) / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.zeros(5)}, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"another shape of weight model\.norm\.weight \(\[5\] in the file, \[16\] in the model"
    ):
        check_model(base)
