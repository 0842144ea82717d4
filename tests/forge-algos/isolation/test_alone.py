"""Documents that a packed row would mix are run alone, within one forward of the model."""

import copy
import gc
import weakref
from itertools import accumulate

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from forge_algos import SFT, PackedBatchError, SupervisedSettings, evaluate, guard_packed, keep_documents_apart, shares_prompts
from forge_algos.adaptations import osft_importance
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._neftune import noisy_embeddings
from forge_algos.isolation import _rows
from forge_algos.isolation._alone import HOW, lengths_of_lines, run_documents_alone, runs_alone
from forge_algos.isolation._rows import divide

from ...lanes import quick_keeps
from ..oracle import CPU, SIZES, assert_other_calls_are_equal, make, naive, pack, samples

LENGTHS = (5, 2, 9, 5, 17, 1, 40)


_BERT = {"is_decoder": True, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def leaking(name):
    """Return a model that carries one document of a row into the next, or counts positions otherwise than from 0 (RoBERTa)."""
    shape = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2}
    config = {
        "mamba": lambda: transformers.MambaConfig(**shape, state_size=4, time_step_rank=2),
        "mamba2": lambda: transformers.Mamba2Config(**shape, num_heads=4, head_dim=8, n_groups=1, state_size=4),
        "mpt": lambda: transformers.MptConfig(vocab_size=61, d_model=16, n_heads=4, n_layers=2, initializer_range=0.1),
        "rwkv": lambda: transformers.RwkvConfig(**shape, attention_hidden_size=16),
        "roberta": lambda: transformers.RobertaConfig(
            **shape, **_BERT, num_attention_heads=4, intermediate_size=24, pad_token_id=1, initializer_range=0.3
        ),
        # Its decoder returns more than hidden states, which its head needs.
        "prophetnet": lambda: transformers.ProphetNetConfig(
            vocab_size=61,
            hidden_size=16,
            is_decoder=True,
            num_decoder_layers=2,
            num_decoder_attention_heads=4,
            decoder_ffn_dim=24,
            ngram=2,
            dropout=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
        ),
    }[name]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    lines=st.sampled_from(["padded", "equal", "single"]),
)
def test_every_document_is_in_one_forward(lengths, lines):
    """A division is a partition; equal lines are equal, and padded ones waste a quarter at most beyond a small forward."""
    groups = divide(lengths, lines)
    assert sorted(document for group in groups for document in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[document] for document in group]
        places = len(own) * max(own)
        assert lines != "single" or len(own) == 1
        assert lines != "equal" or len(set(own)) == 1
        assert len(own) == 1 or places <= max(256, 1.25 * sum(own))


@pytest.mark.parametrize(
    "name", quick_keeps(["mamba", "mpt", "rwkv"], ["mamba", "mamba2", "mpt", "rwkv", "roberta", "prophetnet"])
)
def test_losses_and_gradients_are_those_of_each_document_by_itself(name):
    """The objective takes a model that it refused, and its sum and gradients are those of unpadded forwards."""
    model, examples = leaking(name), samples(LENGTHS)
    with pytest.raises(PackedBatchError):
        SFT().bind(model, device=CPU)
    packed, why = keep_documents_apart(model, device=CPU)
    assert not packed
    assert "does not keep packed documents apart" in why or "cannot run a packed row" in why
    assert HOW["equal" if name == "prophetnet" else "padded"] in why
    with guard_packed(model):
        terms = SFT().bind(model, device=CPU)(pack(examples), [])
    terms.sum.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    expected, count = naive(model, examples)
    expected.backward()
    assert terms.count == count
    torch.testing.assert_close(terms.sum, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # Of all, for one element may be what is left of large ones, whose rounding depends on the processor.
            assert (found[name] - parameter.grad).norm() <= 1e-5 * (1 + parameter.grad.norm()), name


@pytest.mark.parametrize("lines", ["padded", "equal", "single"])
@pytest.mark.parametrize("small", [1, 256])
def test_each_way_and_forwards_of_weight_zero_give_the_same(lines, small, monkeypatch):
    """Whatever documents share a forward, and however many forwards other ranks need, sum and gradients stay."""
    monkeypatch.setattr(_rows, "_SMALL", small)
    examples, found = samples(LENGTHS), []
    for agree in (None, lambda number: number + 3):
        model = make("llama-untied")
        if agree is not None:
            run_documents_alone(model, device=CPU, agree=agree)
            model._documents_alone.lines = lines
        terms = SFT().bind(model, device=CPU)(pack(examples), [])
        terms.sum.backward()
        found.append((terms.sum.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_model_that_can_be_packed_is_packed():
    """Nothing is replaced; with packing=off documents run alone."""
    model = make("qwen3")
    assert keep_documents_apart(model, device=CPU)[0]
    assert not runs_alone(model)
    assert keep_documents_apart(model, device=CPU, packing="off") == (False, f"documents are run alone, {HOW['padded']}")
    assert runs_alone(model)
    assert keep_documents_apart(model, device=CPU)[0] is False


def test_a_model_that_trains_on_whole_chunks_alone_is_refused():
    """Reformer takes documents as long as its chunks; longer ones transformers refuses at some step or other."""
    config = transformers.ReformerConfig(
        vocab_size=61,
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=24,
        is_decoder=True,
        axial_pos_shape=(4, 8),
        axial_pos_embds_dim=(8, 8),
        attn_layers=["local"],
        local_attn_chunk_length=8,
        lsh_attn_chunk_length=8,
        local_num_chunks_after=0,
    )
    for longest in (None, 9):
        with pytest.raises(PackedBatchError, match="at most 8 tokens.*max_seq_len=8"):
            keep_documents_apart(transformers.ReformerModelWithLMHead(config), device=CPU, longest=longest)
    packed, why = keep_documents_apart(transformers.ReformerModelWithLMHead(config), device=CPU, longest=8)
    assert not packed, why


def test_packing_on_refuses():
    """With packing=on a model that leaks is refused and left as it was."""
    model = leaking("mamba")
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart"):
        keep_documents_apart(model, device=CPU, packing="on")
    assert not runs_alone(model)


def test_a_model_that_sees_its_padding_gets_equal_lines():
    """Where what stands behind a document changes it, only equally long ones share a forward."""
    model = make("llama-untied").eval()
    model.model.norm.register_forward_hook(_add_mean)
    assert run_documents_alone(model, device=CPU) == HOW["equal"]


def _add_mean(_module, _args, output):
    return output + output.mean(1, keepdim=True)


def test_other_calls_are_as_before():
    """A padded batch under a mask, and a cache, reach the decoder unchanged."""
    plain, model = make().eval(), make().eval()
    run_documents_alone(model, device=CPU)
    assert_other_calls_are_equal(model, plain)


def test_completions_do_not_share_a_prompt():
    """`shares_prompts` says why, and a row that shares one is refused."""
    model = leaking("mamba")
    run_documents_alone(model, device=CPU)
    can, why = shares_prompts(model, device=CPU)
    assert not can
    assert why == "documents are run alone: each completion is computed with a prompt of its own"
    row = packed_inputs(torch.arange(4), torch.arange(4), torch.tensor([0, 4]), 4) | {"kv_rows": torch.arange(4)}
    with pytest.raises(PackedBatchError, match="share"):
        model(**row)


def test_noise_goes_by_each_documents_own_length():
    """NEFTune's noise is bounded by the document that a token is in, not by its row or its line."""
    model = make("llama-untied")
    run_documents_alone(model, device=CPU)
    seen = []

    def look(_layer, _args, found):
        seen.append((found.detach(), lengths_of_lines(model)))

    row = packed_inputs(torch.full((12,), 3), torch.tensor([*range(10), 0, 1]), torch.tensor([0, 10, 12]), 10)
    with noisy_embeddings(model, 5.0, row["cu_seq_lens_q"]):
        model.get_input_embeddings().register_forward_hook(look)
        model(**row)
    (found, lengths) = seen[0]
    noise = (found - model.get_input_embeddings().weight[3]).detach().abs()
    assert lengths.tolist() == [10, 2]
    for line, length in enumerate((10, 2)):
        most = 5.0 / (length * 16) ** 0.5
        assert 0.8 * most < noise[line, :length].max() <= most
    assert lengths_of_lines(model) is None


def test_an_evaluation_runs_them_alone():
    """`evaluate` gives the mean over documents by themselves."""
    model, examples = leaking("mamba2").eval(), samples(LENGTHS)
    keep_documents_apart(model, device=CPU)
    with torch.no_grad():
        expected, count = naive(model, examples)
    found = evaluate(model, [pack(examples)], objective=SFT(SupervisedSettings()))
    assert found.loss == pytest.approx(float(expected) / count, rel=1e-5)


def test_rotary_positions_that_grow_with_a_forward():
    """Where factors go by the longest position of a forward (longrope), a longer document does not change a shorter one."""
    config = transformers.Phi3Config(
        **SIZES | {"max_position_embeddings": 64, "num_key_value_heads": 4},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.0],
            "long_factor": [4.0, 8.0],
        },
        original_max_position_embeddings=16,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval()
    assert keep_documents_apart(model, device=CPU, longest=16)[0]
    packed, why = keep_documents_apart(model, device=CPU, longest=30)
    assert not packed
    assert "longest document of a forward" in why
    assert HOW["equal"] in why
    examples = samples((30, 10, 12, 10))
    with torch.no_grad():
        expected, _ = naive(model, examples)
        found = SFT().bind(model, device=CPU)(pack(examples), [])
    torch.testing.assert_close(found.sum, expected, rtol=1e-5, atol=1e-4)


def test_rotary_frequencies_that_grew_before():
    """Dynamic NTK keeps frequencies that a longer document let grow: each document begins with the first ones."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    sizes = SIZES | {"max_position_embeddings": 16, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, initializer_range=0.3)
    fresh = transformers.LlamaForCausalLM(config).eval()
    long, short = samples((60, 18))
    with torch.no_grad():
        expected = sum(naive(copy.deepcopy(fresh), [example])[0] for example in (long, short))
        assert not keep_documents_apart(fresh, device=CPU, longest=60)[0]
        found = SFT().bind(fresh, device=CPU)(pack([long, short]), [])
        again = SFT().bind(fresh, device=CPU)(pack([short]), [])
        last = naive(fresh, [long])[0]  # which leaves grown frequencies behind
        after = SFT().bind(fresh, device=CPU)(pack([short]), [])
    torch.testing.assert_close(found.sum, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(again.sum, expected - last, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(after.sum, again.sum, rtol=0, atol=0)


def test_importance_is_that_of_the_documents_tokens():
    """OSFT's importance counts neither what fills lines up nor forwards that are made for other ranks."""
    found = []
    targets = ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    for agree in (None, lambda number: number + 2):
        model = make("llama-untied")
        if agree is not None:
            run_documents_alone(model, device=CPU, agree=agree)
        found.append(osft_importance(model, [pack(samples((40, 3, 5, 2, 6)))], targets=targets))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_decoder_that_is_fed_embeddings_trains():
    """Lines are made of embeddings too, with gradients to them."""
    model, examples = make("llama-untied"), samples(LENGTHS)
    ids = torch.tensor(pack(examples).input_ids)[None]
    run_documents_alone(model, device=CPU)
    starts = torch.tensor([0, *accumulate(LENGTHS)])
    embedded = model.get_input_embeddings()(ids)
    logits = model(inputs_embeds=embedded, cu_seq_lens_q=starts, use_cache=False).logits
    logits.sum().backward()
    for (row, _), found in zip(examples, logits[0].split(LENGTHS), strict=True):
        torch.testing.assert_close(found, model(torch.tensor(row)[None], use_cache=False).logits[0], rtol=1e-4, atol=1e-4)
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.parametrize("given", [{"use_cache": True}, {"attention_mask": torch.ones(1, 4, dtype=torch.int64)}])
def test_a_cache_or_a_mask_beside_a_row_is_refused(given):
    """As for a packed row: its documents would see each other."""
    model = make()
    run_documents_alone(model, device=CPU)
    row = packed_inputs(torch.arange(4), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 4]), 2) | given
    with pytest.raises(PackedBatchError, match="cache"):
        model(**row)
    assert lengths_of_lines(model) is None


def test_a_model_is_freed():
    """A model that ran its documents alone is freed with its last name."""
    model = make()
    run_documents_alone(model, device=CPU)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_packing_on_refuses_a_model_that_runs_alone():
    """What was set up cannot be undone silently."""
    model = make()
    run_documents_alone(model, device=CPU)
    with pytest.raises(PackedBatchError, match="alone already"):
        keep_documents_apart(model, device=CPU, packing="on")
