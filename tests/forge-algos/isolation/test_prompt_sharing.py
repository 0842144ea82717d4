"""Whether completions may share a prompt is found by running the model."""

import gc
import weakref

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from forge_algos import AdapterSettings, PackedBatchError, adapt, group_inputs, guard_packed, shares_prompts

from ..batches.test_groups import row
from ..oracle import CPU, SIZES, make


def gathering(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, *, kv_rows=None, **rest):
    """Compute attention with an explicit mask from kv_rows.
    Each segment sees the keys of its kv_rows, its last query at its last key.
    """
    ends_q, ends_k = rest["cu_seq_lens_q"].tolist(), rest["cu_seq_lens_k"].tolist()
    rows = torch.arange(key.shape[2]) if kv_rows is None else kv_rows
    heads, outputs = query.shape[1] // key.shape[1], []
    for segment in range(len(ends_q) - 1):
        seen = rows[ends_k[segment] : ends_k[segment + 1]]
        q = query[:, :, ends_q[segment] : ends_q[segment + 1]]
        k, v = (x[:, :, seen].repeat_interleave(heads, 1) for x in (key, value))
        see = torch.ones(q.shape[2], len(seen), dtype=torch.bool).tril(len(seen) - q.shape[2])
        scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~see, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, 2).transpose(1, 2), None


def forgetful(module, query, key, value, attention_mask=None, *, kv_rows=None, **rest):
    """Accept kv_rows and ignore them: each completion sees itself alone."""
    rest["cu_seq_lens_k"] = rest["cu_seq_lens_q"]
    return gathering(module, query, key, value, **rest)


def leaking(module, query, key, value, attention_mask=None, *, kv_rows=None, **rest):
    """Add a hundredth of the value of the token before, of whichever document."""
    out, _ = gathering(module, query, key, value, kv_rows=kv_rows, **rest)
    before = value.repeat_interleave(query.shape[1] // value.shape[1], 1).roll(1, 2).transpose(1, 2)
    return out + 0.02 * before, None


def silent(module, query, key, value, attention_mask=None, **rest):
    """Pass everything on, without naming kv_rows in the signature."""
    return gathering(module, query, key, value, **rest)


for function in (gathering, forgetful, leaking, silent):
    AttentionInterface.register(f"test_{function.__name__}", function)
    AttentionMaskInterface.register(f"test_{function.__name__}", lambda **_: None)


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen3"])
def test_attention_that_shares_prompts_passes(architecture):
    """Attention that knows kv_rows passes in float32, bfloat16 and with adapters.
    Modes, gradients and random state are as before.
    """
    model = make(architecture, attention="test_gathering")
    model.model.layers[0].eval()
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    can, why = shares_prompts(model, device=CPU)
    assert can
    assert "'test_gathering'" in why
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert shares_prompts(make(architecture, attention="test_gathering").bfloat16(), device=CPU)[0]
    assert shares_prompts(
        adapt(make(architecture, attention="test_gathering"), AdapterSettings(adapter="lora")).model, device=CPU
    )[0]


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ("test_forgetful", "does not share prompts: the second completion comes out otherwise than alone"),
        ("test_leaking", "does not share prompts: a document before the group comes out otherwise than alone"),
        ("test_silent", "'test_silent' does not know kv_rows"),
        ("sdpa", "'sdpa' does not know kv_rows"),
        ("eager", "'eager' does not know kv_rows"),
    ],
)
def test_attention_that_does_not_share_prompts_is_found(attention, reason):
    """Attention that leaves the prompt out or mixes completions is found, with the reason."""
    can, why = shares_prompts(make(attention=attention), device=CPU)
    assert not can
    assert reason in why


def test_a_forgotten_prompt_is_found_in_few_digits():
    """Attention that leaves the prompt out is found in bfloat16, though the prompt's own tokens are most and come out right."""
    can, why = shares_prompts(make(attention="test_forgetful").bfloat16(), device=CPU)
    assert not can
    assert "the second completion comes out otherwise than alone" in why


def test_a_decoder_that_mixes_completions_is_found():
    """A model whose decoder passes on what came before in the row is found.
    Even where its attention is right.
    """

    class Crosstalk(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.register_forward_hook(self.leak)

        def leak(self, _module, _args, output):
            output.last_hidden_state = output.last_hidden_state + 5e-3 * output.last_hidden_state.cumsum(1)
            return output

    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "test_gathering"
    can, why = shares_prompts(Crosstalk(config), device=CPU)
    assert not can
    assert "completion" in why


def test_an_error_inside_the_model_is_a_no():
    """An error inside the model is a no, not a crash."""
    model = make(attention="test_gathering")
    model.model.layers[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("no rows of ours")))
    can, why = shares_prompts(model, device=CPU)
    assert not can
    assert "cannot run a row with a shared prompt: no rows of ours" in why


def test_out_of_memory_is_raised():
    """Out of memory is raised, and the next call tries again."""
    model = make(attention="test_gathering")
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too little"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        shares_prompts(model, device=CPU)
    hook.remove()
    assert shares_prompts(model, device=CPU)[0]


def test_the_answer_is_stored():
    """The same model on the same attention is run once, another attention again.
    The stored answer does not keep the model alive.
    """
    model, calls = make(attention="test_gathering"), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for attention in ("test_gathering", "test_gathering", "test_forgetful"):
        model.set_attn_implementation(attention)
        calls.clear()
        assert shares_prompts(model, device=CPU)[0] == (attention == "test_gathering")
        counts.append(len(calls))
    assert counts[0] > counts[1] == 0 < counts[2]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_shared_prompts_are_refused_before_a_check():
    """The guard passes a row with kv_rows only where `shares_prompts` returned yes.
    On the model, its decoder and through adapters.
    """
    model = make(attention="test_gathering")
    inputs = group_inputs(row(), CPU)
    with guard_packed(model):
        for module in (model, model.model):
            with pytest.raises(PackedBatchError, match=r"'test_gathering', which was not shown to share.*share_prompt=False"):
                module(**inputs)
        assert shares_prompts(model, device=CPU)[0]
        for module in (model, model.model):
            module(**inputs)
        model.set_attn_implementation("sdpa")
        with pytest.raises(PackedBatchError, match="'sdpa', which was not shown to share"):
            model(**inputs)
    adapted = adapt(make(attention="test_forgetful"), AdapterSettings(adapter="lora")).model
    assert not shares_prompts(adapted, device=CPU)[0]
    with guard_packed(adapted), pytest.raises(PackedBatchError, match="share"):
        adapted(**inputs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"use_cache": True}, "KV cache"),
        ({"use_cache": None}, "KV cache"),
        ({"attention_mask": torch.ones(1, 8)}, r"2-D attention_mask \[1, 8\]"),
    ],
)
def test_shared_prompts_beside_a_cache_or_mask_are_refused(wrong, message):
    """A single segment with kv_rows is treated as a packed row.
    By its ends alone it would not be.
    """
    model = make(attention="test_gathering")
    assert shares_prompts(model, device=CPU)[0]
    inputs = group_inputs(row(), CPU)
    one = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "position_ids": torch.arange(8)[None]}
    with guard_packed(model), pytest.raises(PackedBatchError, match=message):
        model(**{**inputs, **one, **wrong})
