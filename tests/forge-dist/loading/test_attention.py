"""Attention functions under a name of their own."""

import pytest
import torch

from forge_dist import ModelError, load_model


def load(base, attention, function=None):
    return load_model(base, dtype=torch.float32, device="cpu", attention=attention, attention_function=function)


def test_a_function_is_what_the_model_runs(base, documents):
    """The function is called once a layer, without a mask where the call brings none, and its output is the model's."""
    calls = []

    def counted(module, query, key, value, attention_mask, **kwargs):
        calls.append(attention_mask)
        return documents(module, query, key, value, attention_mask, **kwargs)

    model = load(base, "counted_documents", counted)
    input_ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        found = model(input_ids=input_ids, use_cache=False).logits
        assert calls == [None, None]
        expected = load(base, "eager")(input_ids=input_ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_padding_is_masked(base):
    """A left-padded batch gives the real tokens the logits that they have alone: the mask of an ordinary call is kept."""

    def obeys(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling
        )
        return out.transpose(1, 2), None

    model = load(base, "obeys_masks", obeys).eval()
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([[7, 8]]), use_cache=False).logits[0]
        padded = model(
            input_ids=torch.tensor([[5, 6, 7, 8], [0, 0, 7, 8]]),
            attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
            position_ids=torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]]),
            use_cache=False,
        ).logits[1, 2:]
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


def test_keywords_of_the_call_reach_the_function(base, documents):
    """What the loop passes for packed rows (cu_seq_lens_q) arrives."""
    seen = {}

    def looking(module, query, key, value, attention_mask, **kwargs):
        seen.update(kwargs)
        return documents(module, query, key, value, attention_mask, scaling=kwargs.get("scaling"))

    bounds = torch.tensor([0, 4], dtype=torch.int32)
    load(base, "looking_documents", looking)(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False, cu_seq_lens_q=bounds)
    assert seen["cu_seq_lens_q"] is bounds


def test_a_name_may_be_given_a_new_function(base, documents):
    """A name of ours can be registered again; the newer function runs."""

    def broken(*args, **kwargs):
        raise AssertionError("the old function ran")

    load(base, "twice", broken)
    model = load(base, "twice", documents)
    assert model(input_ids=torch.tensor([[5, 6]]), use_cache=False).logits.shape == (1, 2, 61)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "org/kernel", "", "two words"])
def test_a_function_takes_no_name_of_transformers(base, documents, name):
    """A function cannot replace what every other model of the process runs on, nor look like a kernel of the hub."""
    with pytest.raises(ModelError, match="name of your own"):
        load(base, name, documents)


def test_an_architecture_without_a_place_for_a_function(tmp_path, documents):
    """An architecture that looks its attention up in a table of its own is refused with the remedy, which works."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    FalconForCausalLM(config).save_pretrained(tmp_path / "falcon")
    path = str(tmp_path / "falcon")
    with pytest.raises(ModelError, match=r"no place for an attention function of ours .*use attention=eager") as caught:
        load(path, "documents", documents)
    assert path in str(caught.value)
    assert load(path, "eager").config._attn_implementation == "eager"


def test_transformers_chooses_where_nothing_is_named(base, documents):
    """None is transformers' own choice, and no name for a function."""
    assert load(base, None).config._attn_implementation == "sdpa"
    with pytest.raises(ModelError, match="name of your own"):
        load(base, None, documents)


@pytest.mark.parametrize("name", ["never_registered", "kernels-community/flash-attn", ""])
def test_an_unknown_name_is_refused(base, name):
    """A name without a function must be known; nothing is fetched from the hub for it."""
    with pytest.raises(ModelError, match="unknown without an attention_function; known: .*sdpa"):
        load(base, name)
