"""Virtual tokens where they cannot work: refused by name, with what to do."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from forge_algos import (
    SFT,
    AdapterError,
    AdapterSettings,
    LossError,
    PackedBatchError,
    Reward,
    RolloutError,
    adapt,
    group_inputs,
    guard_packed,
    shares_prompts,
)
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._layout import lay_out
from forge_algos.online import GenerateSampler

from ...batches.test_groups import row as shared_row
from ...oracle import CPU, SIZES, make, pack, samples
from ...preferences import a_classifier, plain_attention, shareable
from .test_prompts import adapted, virtual


def with_attention(model, name, function, mask):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    model.config._attn_implementation = name
    return model


@virtual
def test_an_attention_for_packed_rows_alone_is_refused(kind):
    """An attention for packed rows alone is refused, with the attentions that work."""
    model = with_attention(adapted(kind), "rows_alone", plain_attention, lambda *_args, **_kwargs: None)
    with pytest.raises(AdapterError, match="'rows_alone' cannot run documents in lines.*attention=sdpa or eager"):
        SFT().bind(model, device=CPU)


def test_an_attention_that_counts_from_the_first_key():
    """An attention that is causal from the upper left corner is refused.
    A query sees the prefix in the places of its own document's tokens.
    """

    def upper_left(module, query, key, value, attention_mask, **kwargs):
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        return sdpa_attention_forward(module, query, key, value, seen[None, None].expand(len(query), 1, -1, -1), **kwargs)

    model = with_attention(adapted("prefix"), "upper_left", upper_left, sdpa_mask)
    with pytest.raises(AdapterError, match="'upper_left' does not do what virtual tokens need.*does not see the one before it"):
        SFT().bind(model, device=CPU)


def test_a_prefix_under_activation_checkpointing():
    """A prefix under activation checkpointing is refused; a prompt is not concerned.
    transformers drops past keys there, with a line in its log, so the prefix would have no effect.
    """
    for kind in ("prefix", "prompt"):
        model = adapted(kind)
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        if kind == "prompt":
            SFT().bind(model, device=CPU)(pack(samples((4, 6))), []).sum.backward()
            continue
        with pytest.raises(AdapterError, match="activation_checkpointing.*adapter=prompt"):
            SFT().bind(model, device=CPU)


@virtual
def test_packed_rows_in_direct_calls_are_refused(kind):
    """A packed row in a direct call of the model is refused, shared prompts too.
    It has no place for virtual tokens.
    """
    model = adapted(kind)
    row = pack(samples((4, 6)))
    inputs = packed_inputs(
        *(torch.tensor(array) for array in (row.input_ids, row.position_ids, row.cu_seqlens)), row.max_seqlen
    )
    with guard_packed(model), pytest.raises(PackedBatchError, match="virtual tokens, which stand before each"):
        model(**inputs)
    shared, why = shares_prompts(shareable(model), device=CPU)
    assert not shared
    assert "virtual tokens" in why


@virtual
def test_a_base_checked_before_its_adapter(kind):
    """The result of a check of the base is not reused for its PeftModel.
    Nor by the guard, although the object within is the same.
    """
    base = shareable(make())
    assert shares_prompts(base, device=CPU)[0]
    model = adapted(kind, base)
    inputs = group_inputs(shared_row(), CPU)
    with guard_packed(model), pytest.raises(PackedBatchError, match="was not shown to share"):
        base(**inputs)
    assert not shares_prompts(model, device=CPU)[0]
    assert shares_prompts(base, device=CPU)[0]


def test_rows_that_have_no_lines():
    """A row that shares a prompt, or whose positions do not count from 0, has no lines: refused."""
    model = adapted("prefix")
    with pytest.raises(PackedBatchError, match=r"kv_rows.*prompt of its own.*share_prompt=False"):
        lay_out(model, group_inputs(shared_row(), CPU))
    for positions in ([0, 1, 2, 1, 2], [0, 1, 2, 3, 4], [0, 2, 1, 0, 1]):
        with pytest.raises(PackedBatchError, match="count each document of cu_seq_lens_q from 0"):
            lay_out(model, packed_inputs(torch.arange(5), torch.tensor(positions), torch.tensor([0, 3, 5]), 3))


def test_models_that_peft_has_no_adaption_prompts_for():
    """Other architectures, more layers than exist and reward models have no adaption prompts.
    PEFT would leave a reward model's score as it is.
    """
    settings = AdapterSettings(adapter="adapter_prompt", num_virtual_tokens=2)
    with pytest.raises(AdapterError, match="for llama, mistral, gpt2 and not for qwen3"):
        adapt(make("qwen3"), settings)
    with pytest.raises(AdapterError, match="adapter_layers=3: the model has 2 layers"):
        adapt(make(), AdapterSettings(adapter="adapter_prompt", adapter_layers=3))
    with pytest.raises(AdapterError, match="score"):
        adapt(a_classifier(), settings)


@pytest.mark.parametrize("size", [2, 8])
def test_heads_that_do_not_make_up_the_width(size):
    """Models whose heads do not make up the width are refused when the adapter is attached.
    PEFT counts key heads by the width, and a shape error would follow in the first forward.
    """
    model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=size))
    with pytest.raises(AdapterError, match=f"16 is not 4 times {size}; take adapter=prefix or lora"):
        adapt(model, AdapterSettings(adapter="adapter_prompt"))


def test_a_text_without_a_tokenizer(tmp_path):
    """A `prompt_init_text` without a tokenizer is refused; a path without one is named.
    The error for a model without a path names who could supply tokens.
    """
    settings = AdapterSettings(adapter="prompt", prompt_init_text="Answer in verse.")
    with pytest.raises(AdapterError, match="tokenizer_path"):
        adapt(make(), settings)
    with pytest.raises(AdapterError, match="adapter=prompt: PEFT cannot attach it"):
        adapt(make(), settings, tokenizer_path=str(tmp_path))


def test_a_prompt_before_a_reward_model():
    """A prompt before a reward model is refused.
    transformers finds a padded line's last token by ids, and a prompt is passed as embeddings.
    """
    with pytest.raises(AdapterError, match="adapter=prompt.*adapter=prefix or lora"):
        adapt(a_classifier(), AdapterSettings(adapter="prompt"))


def test_a_reward_model_without_a_padding_token():
    """A reward model without a padding token is refused.
    Documents in lines need one where the model looks for each line's last token.
    """
    model = adapted("prefix", a_classifier())
    model.get_base_model().config.pad_token_id = None
    with pytest.raises(LossError, match="set pad_token_id"):
        Reward().bind(model, device=CPU)


def test_partitioned_by_zero_3():
    """Prefix and prompt are refused under ZeRO-3, where PEFT would read weights without values."""
    model = make()
    next(model.parameters()).ds_shape = (61, 16)
    with pytest.raises(AdapterError, match="ZeRO-3.*fsdp2 or zero2"):
        adapt(model, AdapterSettings(adapter="prefix"))


@virtual
def test_sampling(kind):
    """Greedy completions of unequal prompts are those of plain PEFT one prompt at a time.
    A model divided over ranks is refused.
    """
    model = adapted(kind).eval()
    prompts = [np.arange(3, 8), np.arange(20, 23), np.array([9]), np.arange(30, 33)]
    how = {"eos_ids": [1000], "pad_id": 0, "batch_tokens": 1000}
    found = GenerateSampler(model, **how).sample(
        prompts, num_generations=2, max_new_tokens=5, temperature=1e-4, top_p=1.0, top_k=0, seed=0
    )
    for number, completion in enumerate(found):
        ids = [*prompts[number // 2]]
        with torch.no_grad():
            for _ in range(5):
                ids.append(int(model(torch.tensor(ids)[None], use_cache=False).logits[0, -1].argmax()))
        assert completion.ids.tolist() == ids[-5:]
    with pytest.raises(RolloutError, match="virtual tokens.*strategy=ddp"):
        GenerateSampler(model, **how, synced=True)
