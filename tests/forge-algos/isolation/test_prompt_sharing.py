"""Whether completions may share a prompt is found by trying, and never by trusting."""

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
    """Attention with an explicit mask: each segment to the keys of its kv_rows, its last query at its last key."""
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
    """Names kv_rows and does not read it: each completion sees itself alone."""
    rest["cu_seq_lens_k"] = rest["cu_seq_lens_q"]
    return gathering(module, query, key, value, **rest)


def leaking(module, query, key, value, attention_mask=None, *, kv_rows=None, **rest):
    """Right but for a hundredth of the value of the token before, whoever's that is."""
    out, _ = gathering(module, query, key, value, kv_rows=kv_rows, **rest)
    before = value.repeat_interleave(query.shape[1] // value.shape[1], 1).roll(1, 2).transpose(1, 2)
    return out + 0.02 * before, None


def silent(module, query, key, value, attention_mask=None, **rest):
    """Passes everything on, but does not say that it knows kv_rows."""
    return gathering(module, query, key, value, **rest)


for function in (gathering, forgetful, leaking, silent):
    AttentionInterface.register(f"test_{function.__name__}", function)
    AttentionMaskInterface.register(f"test_{function.__name__}", lambda **_: None)


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen3"])
def test_what_shares_prompts_says_yes(architecture):
    """In float32 and bfloat16 and with adapters; no trace is left in modes, gradients or the random state."""
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
    ("attention", "said"),
    [
        ("test_forgetful", "does not share prompts: the second completion comes out otherwise than alone"),
        ("test_leaking", "does not share prompts: a document before the group comes out otherwise than alone"),
        ("test_silent", "'test_silent' does not know kv_rows"),
        ("sdpa", "'sdpa' does not know kv_rows"),
        ("eager", "'eager' does not know kv_rows"),
    ],
)
def test_what_does_not_says_no(attention, said):
    """Attention that would leave the prompt out, or lets completions see each other, is found out, with the reason."""
    can, why = shares_prompts(make(attention=attention), device=CPU)
    assert not can
    assert said in why


def test_what_carries_a_state_from_completion_to_completion_says_no():
    """The attention may be right and the model not: here a decoder that lets what came before in the row through."""

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


def test_a_model_that_cannot_run_such_a_row_says_no():
    """An error inside the model is an answer, not a crash."""
    model = make(attention="test_gathering")
    model.model.layers[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("no rows of ours")))
    can, why = shares_prompts(model, device=CPU)
    assert not can
    assert "cannot run a row with a shared prompt: no rows of ours" in why


def test_running_out_of_memory_is_no_answer():
    """It is raised, and the next question tries again."""
    model = make(attention="test_gathering")
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too little"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        shares_prompts(model, device=CPU)
    hook.remove()
    assert shares_prompts(model, device=CPU)[0]


def test_it_is_asked_once():
    """The same model on the same attention is not run again, another attention is; and nothing keeps the model alive."""
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


def test_a_shared_prompt_meets_no_attention_that_was_not_asked():
    """Under the guard a row with kv_rows runs only where shares_prompts said yes, on the model, its decoder and through adapters."""
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
def test_a_shared_prompt_meets_no_cache_and_no_mask(wrong, message):
    """A single segment with kv_rows is a packed row too, which by its ends alone it would not be."""
    model = make(attention="test_gathering")
    assert shares_prompts(model, device=CPU)[0]
    inputs = group_inputs(row(), CPU)
    one = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "position_ids": torch.arange(8)[None]}
    with guard_packed(model), pytest.raises(PackedBatchError, match=message):
        model(**{**inputs, **one, **wrong})
